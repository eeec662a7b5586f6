CREATE TABLE public.alembic_version (
    version_num character varying(32) NOT NULL
);
CREATE TABLE public.api_keys (
    id character varying(16) NOT NULL,
    name character varying(100) NOT NULL,
    role character varying(16) NOT NULL,
    digest character varying(64) NOT NULL,
    created_at double precision NOT NULL,
    revoked_at double precision
);
CREATE TABLE public.batches (
    "position" bigint NOT NULL,
    id character varying(32) NOT NULL,
    name character varying(200) NOT NULL,
    owner character varying(100) NOT NULL,
    idempotency_key character varying(255),
    created_at double precision NOT NULL,
    request_hash character varying(80) NOT NULL,
    document text NOT NULL
);
CREATE SEQUENCE public.batches_position_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.batches_position_seq OWNED BY public.batches."position";
CREATE TABLE public.checkpoints (
    "position" bigint NOT NULL,
    document text NOT NULL
);
CREATE TABLE public.comparisons (
    "position" bigint NOT NULL,
    document text NOT NULL
);
CREATE TABLE public.deployment_versions (
    "position" bigint NOT NULL,
    version integer NOT NULL,
    created_at double precision NOT NULL,
    reason text NOT NULL,
    job_id character varying(32) NOT NULL,
    predicted_ms double precision NOT NULL,
    measured_ms double precision,
    num_measured integer NOT NULL,
    schedule text NOT NULL
);
CREATE TABLE public.deployments (
    "position" bigint NOT NULL,
    id character varying(32) NOT NULL,
    name character varying(200) NOT NULL,
    owner character varying(100) NOT NULL,
    idempotency_key character varying(255),
    created_at double precision NOT NULL,
    ended_at double precision,
    request_hash character varying(80) NOT NULL,
    options text NOT NULL,
    problem text NOT NULL,
    measured text,
    planned text NOT NULL,
    planned_ms double precision,
    version integer NOT NULL,
    job_reason text,
    job_id character varying(32),
    num_solves integer NOT NULL,
    num_seen integer NOT NULL,
    error text,
    num_reports integer NOT NULL,
    num_judged integer NOT NULL,
    current_ms double precision,
    expected_ms double precision
);
CREATE SEQUENCE public.deployments_position_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.deployments_position_seq OWNED BY public.deployments."position";
CREATE TABLE public.events (
    number bigint NOT NULL,
    "position" bigint NOT NULL,
    kind character varying(16) NOT NULL,
    at double precision NOT NULL,
    seconds double precision,
    method character varying(100),
    objective_ms double precision,
    bound_ms double precision,
    text text
);
CREATE SEQUENCE public.events_number_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.events_number_seq OWNED BY public.events.number;
CREATE TABLE public.job_tags (
    "position" bigint NOT NULL,
    tag character varying(64) NOT NULL
);
CREATE TABLE public.jobs (
    "position" bigint NOT NULL,
    id character varying(32) NOT NULL,
    state character varying(16) NOT NULL,
    name character varying(200) NOT NULL,
    problem_hash character varying(80) NOT NULL,
    objective character varying(16) NOT NULL,
    options text NOT NULL,
    idempotency_key character varying(255),
    created_at double precision NOT NULL,
    started_at double precision,
    finished_at double precision,
    cancel_requested boolean NOT NULL,
    attempt integer NOT NULL,
    deaths integer NOT NULL,
    spent_s double precision NOT NULL,
    lease_owner character varying(64),
    lease_expires_at double precision,
    claimed_at double precision,
    objective_ms double precision,
    bound_ms double precision,
    error text,
    kind character varying(16) DEFAULT 'solve'::character varying NOT NULL,
    owner character varying(100) DEFAULT ''::character varying NOT NULL,
    shape_hash character varying(80) DEFAULT ''::character varying NOT NULL,
    priority integer DEFAULT 0 NOT NULL,
    cache character varying(8) DEFAULT 'miss'::character varying NOT NULL,
    source_id character varying(32),
    batch_id character varying(32),
    batch_index integer,
    deployment_id character varying(32),
    num_schedules integer DEFAULT 0 NOT NULL
);
CREATE SEQUENCE public.jobs_position_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.jobs_position_seq OWNED BY public.jobs."position";
CREATE TABLE public.measurements (
    number bigint NOT NULL,
    "position" bigint NOT NULL,
    at double precision NOT NULL,
    version integer NOT NULL,
    step bigint,
    step_ms double precision,
    document text NOT NULL
);
CREATE SEQUENCE public.measurements_number_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.measurements_number_seq OWNED BY public.measurements.number;
CREATE TABLE public.models (
    "position" bigint NOT NULL,
    document text NOT NULL
);
CREATE TABLE public.problems (
    "position" bigint NOT NULL,
    document text NOT NULL
);
CREATE TABLE public.questions (
    "position" bigint NOT NULL,
    document text NOT NULL
);
CREATE TABLE public.schedules (
    "position" bigint NOT NULL,
    document text NOT NULL
);
CREATE TABLE public.tuned (
    "position" bigint NOT NULL,
    document text NOT NULL
);
CREATE TABLE public.turns (
    owner character varying(100) NOT NULL,
    number bigint NOT NULL
);
ALTER TABLE ONLY public.batches ALTER COLUMN "position" SET DEFAULT nextval('public.batches_position_seq'::regclass);
ALTER TABLE ONLY public.deployments ALTER COLUMN "position" SET DEFAULT nextval('public.deployments_position_seq'::regclass);
ALTER TABLE ONLY public.events ALTER COLUMN number SET DEFAULT nextval('public.events_number_seq'::regclass);
ALTER TABLE ONLY public.jobs ALTER COLUMN "position" SET DEFAULT nextval('public.jobs_position_seq'::regclass);
ALTER TABLE ONLY public.measurements ALTER COLUMN number SET DEFAULT nextval('public.measurements_number_seq'::regclass);
INSERT INTO public.alembic_version VALUES ('0008');
INSERT INTO public.api_keys VALUES ('ea317afd7015', 'ci', 'submit', 'db305ee82aecd72530f76bad1fdf0c13dcd160d4c1f115c4f45e31a63623d7ea', 1000000, NULL);
INSERT INTO public.api_keys VALUES ('fdeb070b4bbb', 'gone', 'read', '7e5f61a8330062768d4254ef93adf1c86c9b18555d5d5fed9f96760807e109a9', 1000000, 1000000);
INSERT INTO public.batches VALUES (1, '45dbe7151160463895ed3f86b75c916d', 'sweep', 'ann', NULL, 1000000, 'sha256:sweep', '{"axes":{"memory_scale":[1,0.5]},"options":{"time_limit_s":5.0,"work_limit":null,"threads":2,"seed":0,"gap":1e-06,"method":"auto","cache":"use","robust":null,"jitter":0.1,"stragglers":0.1,"chunks":null,"placements":null,"workload":null},"tags":["t"],"priority":0,"items":[{"values":{"memory_scale":1},"memory_bytes":[7],"family":"f","tighter":[1]},{"values":{"memory_scale":0.5},"memory_bytes":[7],"family":"f","tighter":[]}]}');
INSERT INTO public.checkpoints VALUES (4, 'search of tuned');
INSERT INTO public.comparisons VALUES (3, 'rows of compared');
INSERT INTO public.deployment_versions VALUES (1, 1, 1000000, 'registered', 'c03c8e99885f4873b55701a7aa23dcb3', 8, 8.5, 1, 'schedule of run');
INSERT INTO public.deployments VALUES (1, '469d239a590c4feba6ef500eedddea4f', 'run', 'ci', NULL, 1000000, NULL, 'sha256:run', '{"job":{"time_limit_s":5.0,"work_limit":null,"threads":2,"seed":0,"gap":1e-06,"method":"auto","cache":"use","robust":null,"jitter":0.1,"stragglers":0.1,"chunks":null,"placements":null,"workload":null},"threshold":0.02}', 'problem of run', 'problem of run as measured', 'problem of run', 8, 1, 'registered', 'c03c8e99885f4873b55701a7aa23dcb3', 1, 1, NULL, 1, 0, NULL, NULL);
INSERT INTO public.events VALUES (1, 1, 'state', 1000000, NULL, NULL, NULL, NULL, 'queued');
INSERT INTO public.events VALUES (2, 2, 'state', 1000000, NULL, NULL, NULL, NULL, 'queued');
INSERT INTO public.events VALUES (3, 3, 'state', 1000000, NULL, NULL, NULL, NULL, 'queued');
INSERT INTO public.events VALUES (4, 1, 'state', 1000000, NULL, NULL, NULL, NULL, 'running');
INSERT INTO public.events VALUES (5, 1, 'incumbent', 1000000, 1, 'ls', 9, 7, NULL);
INSERT INTO public.events VALUES (6, 1, 'incumbent', 1000000, 0, 'ls', 8, 7, NULL);
INSERT INTO public.events VALUES (7, 1, 'state', 1000000, NULL, NULL, NULL, NULL, 'succeeded');
INSERT INTO public.events VALUES (8, 2, 'state', 1000000, NULL, NULL, NULL, NULL, 'running');
INSERT INTO public.events VALUES (9, 2, 'incumbent', 1000000, 0, 'ls', 6, NULL, NULL);
INSERT INTO public.events VALUES (10, 2, 'state', 1000000, NULL, NULL, NULL, NULL, 'succeeded');
INSERT INTO public.events VALUES (11, 3, 'state', 1000000, NULL, NULL, NULL, NULL, 'running');
INSERT INTO public.events VALUES (12, 3, 'state', 1000000, NULL, NULL, NULL, NULL, 'succeeded');
INSERT INTO public.events VALUES (13, 4, 'state', 1000000, NULL, NULL, NULL, NULL, 'queued');
INSERT INTO public.events VALUES (14, 4, 'state', 1000000, NULL, NULL, NULL, NULL, 'running');
INSERT INTO public.events VALUES (15, 4, 'log', 1000000, NULL, NULL, NULL, NULL, '100 configurations');
INSERT INTO public.events VALUES (16, 4, 'incumbent', 1000000, 1, 'ls', 5, NULL, NULL);
INSERT INTO public.events VALUES (17, 5, 'state', 1000000, NULL, NULL, NULL, NULL, 'queued');
INSERT INTO public.events VALUES (18, 5, 'log', 1000000, NULL, NULL, NULL, NULL, 'started from a schedule of job 11111111111111111111111111111111');
INSERT INTO public.events VALUES (19, 5, 'incumbent', 1000000, 0, 'zb', 9.5, NULL, NULL);
INSERT INTO public.events VALUES (20, 6, 'state', 1000000, NULL, NULL, NULL, NULL, 'queued');
INSERT INTO public.events VALUES (21, 7, 'state', 1000000, NULL, NULL, NULL, NULL, 'queued');
INSERT INTO public.events VALUES (22, 6, 'state', 1000000, NULL, NULL, NULL, NULL, 'running');
INSERT INTO public.events VALUES (23, 6, 'incumbent', 1000000, 0, 'ls', 4, 1, NULL);
INSERT INTO public.events VALUES (24, 6, 'state', 1000000, NULL, NULL, NULL, NULL, 'succeeded');
INSERT INTO public.job_tags VALUES (1, 'a');
INSERT INTO public.job_tags VALUES (1, 'b');
INSERT INTO public.jobs VALUES (6, 'dd1a56487e6b4e72a792aad2695798a2', 'succeeded', 'item 1', 'sha256:item 1', 'makespan', '{"time_limit_s":5.0,"work_limit":null,"threads":2,"seed":0,"gap":1e-06,"method":"auto","cache":"use","robust":null,"jitter":0.1,"stragglers":0.1,"chunks":null,"placements":null,"workload":null}', NULL, 1000000, 1000000, 1000000, false, 1, 0, 0, NULL, NULL, NULL, 4, 1, NULL, 'solve', 'ann', 'sha256:shape', 0, 'miss', NULL, '45dbe7151160463895ed3f86b75c916d', 1, NULL, 1);
INSERT INTO public.jobs VALUES (1, 'c03c8e99885f4873b55701a7aa23dcb3', 'succeeded', 'solved', 'sha256:solved', 'makespan', '{"time_limit_s":5.0,"work_limit":null,"threads":2,"seed":0,"gap":1e-06,"method":"auto","cache":"use","robust":null,"jitter":0.1,"stragglers":0.1,"chunks":null,"placements":null,"workload":null}', 'e84c2994f6b9afdb98204e40ded273ca3030e30aad510abd18077640e4a6d1d4', 1000000, 1000000, 1000000, false, 1, 0, 0, NULL, NULL, NULL, 8, 7, NULL, 'solve', 'ci', 'sha256:shape', 0, 'miss', NULL, NULL, NULL, NULL, 2);
INSERT INTO public.jobs VALUES (2, '9c6975dbebc1494d89337052832a1772', 'succeeded', 'planned', 'sha256:planned', 'makespan', '{"time_limit_s":5.0,"work_limit":null,"threads":2,"seed":0,"gap":1e-06,"method":"auto","cache":"use","robust":null,"jitter":0.1,"stragglers":0.1,"chunks":null,"placements":null,"workload":null}', NULL, 1000000, 1000000, 1000000, false, 1, 0, 0, NULL, NULL, NULL, 6, NULL, NULL, 'plan', 'ci', 'sha256:shape', 0, 'miss', NULL, NULL, NULL, NULL, 1);
INSERT INTO public.jobs VALUES (3, '048e709f05b84b4c8eadbb9a69fa31b1', 'succeeded', 'compared', 'sha256:compared', 'makespan', '{"time_limit_s":5.0,"work_limit":null,"threads":2,"seed":0,"gap":1e-06,"method":"auto","cache":"use","robust":null,"jitter":0.1,"stragglers":0.1,"chunks":null,"placements":null,"workload":null}', NULL, 1000000, 1000000, 1000000, false, 1, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, 'compare', 'ci', 'sha256:shape', 0, 'miss', NULL, NULL, NULL, NULL, 0);
INSERT INTO public.jobs VALUES (4, '484a2c51bbee4d25ab45d50129e5a604', 'running', 'tuned', 'sha256:tuned', 'makespan', '{"time_limit_s":5.0,"work_limit":null,"threads":2,"seed":0,"gap":1e-06,"method":"auto","cache":"use","robust":null,"jitter":0.1,"stragglers":0.1,"chunks":null,"placements":null,"workload":null}', NULL, 1000000, 1000000, NULL, false, 1, 0, 0, 'server', 1000100, 1000000, 5, NULL, NULL, 'tune', 'ci', 'sha256:shape', 0, 'miss', NULL, NULL, NULL, NULL, 1);
INSERT INTO public.jobs VALUES (5, '945879d0b0344656954496fc1f38bde1', 'queued', 'waiting', 'sha256:waiting', 'makespan', '{"time_limit_s":5.0,"work_limit":null,"threads":2,"seed":0,"gap":1e-06,"method":"auto","cache":"use","robust":null,"jitter":0.1,"stragglers":0.1,"chunks":null,"placements":null,"workload":null}', NULL, 1000000, NULL, NULL, false, 0, 0, 0, NULL, NULL, NULL, 9.5, NULL, NULL, 'solve', 'ci', 'sha256:shape', 3, 'near', '11111111111111111111111111111111', NULL, NULL, NULL, 1);
INSERT INTO public.jobs VALUES (7, 'c02ba503d77c48d690537ce481a03c42', 'queued', 'item 0', 'sha256:item 0', 'makespan', '{"time_limit_s":5.0,"work_limit":null,"threads":2,"seed":0,"gap":1e-06,"method":"auto","cache":"use","robust":null,"jitter":0.1,"stragglers":0.1,"chunks":null,"placements":null,"workload":null}', NULL, 1000000, NULL, NULL, false, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, 'solve', 'ann', 'sha256:shape', 0, 'miss', NULL, '45dbe7151160463895ed3f86b75c916d', 0, NULL, 0);
INSERT INTO public.measurements VALUES (1, 1, 1000000, 1, NULL, 8.5, 'report of run');
INSERT INTO public.models VALUES (2, 'model of planned');
INSERT INTO public.problems VALUES (1, 'problem of solved');
INSERT INTO public.problems VALUES (3, 'problem of compared');
INSERT INTO public.problems VALUES (2, 'cut of planned');
INSERT INTO public.problems VALUES (4, 'cut of tuned');
INSERT INTO public.problems VALUES (5, 'problem of waiting');
INSERT INTO public.problems VALUES (6, 'problem of item 1');
INSERT INTO public.problems VALUES (7, 'problem of item 0');
INSERT INTO public.questions VALUES (4, 'question of tuned');
INSERT INTO public.schedules VALUES (1, 'schedule of 8 ms');
INSERT INTO public.schedules VALUES (2, 'schedule of planned');
INSERT INTO public.schedules VALUES (4, 'schedule of tuned');
INSERT INTO public.schedules VALUES (5, 'schedule of near');
INSERT INTO public.schedules VALUES (6, 'schedule of item 1');
INSERT INTO public.tuned VALUES (4, 'tuned so far');
INSERT INTO public.turns VALUES ('ci', 4);
INSERT INTO public.turns VALUES ('ann', 5);
SELECT pg_catalog.setval('public.batches_position_seq', 1, true);
SELECT pg_catalog.setval('public.deployments_position_seq', 1, true);
SELECT pg_catalog.setval('public.events_number_seq', 24, true);
SELECT pg_catalog.setval('public.jobs_position_seq', 7, true);
SELECT pg_catalog.setval('public.measurements_number_seq', 1, true);
ALTER TABLE ONLY public.alembic_version
    ADD CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num);
ALTER TABLE ONLY public.api_keys
    ADD CONSTRAINT pk_api_keys PRIMARY KEY (id);
ALTER TABLE ONLY public.batches
    ADD CONSTRAINT pk_batches PRIMARY KEY ("position");
ALTER TABLE ONLY public.checkpoints
    ADD CONSTRAINT pk_checkpoints PRIMARY KEY ("position");
ALTER TABLE ONLY public.comparisons
    ADD CONSTRAINT pk_comparisons PRIMARY KEY ("position");
ALTER TABLE ONLY public.deployment_versions
    ADD CONSTRAINT pk_deployment_versions PRIMARY KEY ("position", version);
ALTER TABLE ONLY public.deployments
    ADD CONSTRAINT pk_deployments PRIMARY KEY ("position");
ALTER TABLE ONLY public.events
    ADD CONSTRAINT pk_events PRIMARY KEY (number);
ALTER TABLE ONLY public.job_tags
    ADD CONSTRAINT pk_job_tags PRIMARY KEY ("position", tag);
ALTER TABLE ONLY public.jobs
    ADD CONSTRAINT pk_jobs PRIMARY KEY ("position");
ALTER TABLE ONLY public.measurements
    ADD CONSTRAINT pk_measurements PRIMARY KEY (number);
ALTER TABLE ONLY public.models
    ADD CONSTRAINT pk_models PRIMARY KEY ("position");
ALTER TABLE ONLY public.problems
    ADD CONSTRAINT pk_problems PRIMARY KEY ("position");
ALTER TABLE ONLY public.questions
    ADD CONSTRAINT pk_questions PRIMARY KEY ("position");
ALTER TABLE ONLY public.schedules
    ADD CONSTRAINT pk_schedules PRIMARY KEY ("position");
ALTER TABLE ONLY public.tuned
    ADD CONSTRAINT pk_tuned PRIMARY KEY ("position");
ALTER TABLE ONLY public.turns
    ADD CONSTRAINT pk_turns PRIMARY KEY (owner);
ALTER TABLE ONLY public.api_keys
    ADD CONSTRAINT uq_api_keys_name UNIQUE (name);
ALTER TABLE ONLY public.batches
    ADD CONSTRAINT uq_batches_id UNIQUE (id);
ALTER TABLE ONLY public.batches
    ADD CONSTRAINT uq_batches_idempotency_key UNIQUE (idempotency_key);
ALTER TABLE ONLY public.deployments
    ADD CONSTRAINT uq_deployments_id UNIQUE (id);
ALTER TABLE ONLY public.deployments
    ADD CONSTRAINT uq_deployments_idempotency_key UNIQUE (idempotency_key);
ALTER TABLE ONLY public.jobs
    ADD CONSTRAINT uq_jobs_id UNIQUE (id);
ALTER TABLE ONLY public.jobs
    ADD CONSTRAINT uq_jobs_idempotency_key UNIQUE (idempotency_key);
CREATE INDEX ix_deployments_owner_ended_at ON public.deployments USING btree (owner, ended_at);
CREATE INDEX ix_events_position_number ON public.events USING btree ("position", number);
CREATE INDEX ix_job_tags_tag_position ON public.job_tags USING btree (tag, "position");
CREATE INDEX ix_jobs_batch_id_batch_index ON public.jobs USING btree (batch_id, batch_index);
CREATE INDEX ix_jobs_finished_at ON public.jobs USING btree (finished_at);
CREATE INDEX ix_jobs_owner_position ON public.jobs USING btree (owner, "position");
CREATE INDEX ix_jobs_owner_state_position ON public.jobs USING btree (owner, state, "position");
CREATE INDEX ix_jobs_problem_hash_owner_position ON public.jobs USING btree (problem_hash, owner, "position");
CREATE INDEX ix_jobs_queue ON public.jobs USING btree (state, owner, priority DESC, "position");
CREATE INDEX ix_jobs_shape_hash_owner_position ON public.jobs USING btree (shape_hash, owner, "position");
CREATE INDEX ix_jobs_state_position ON public.jobs USING btree (state, "position");
CREATE INDEX ix_measurements_position_number ON public.measurements USING btree ("position", number);
ALTER TABLE ONLY public.checkpoints
    ADD CONSTRAINT fk_checkpoints_position FOREIGN KEY ("position") REFERENCES public.jobs("position");
ALTER TABLE ONLY public.comparisons
    ADD CONSTRAINT fk_comparisons_position FOREIGN KEY ("position") REFERENCES public.jobs("position");
ALTER TABLE ONLY public.deployment_versions
    ADD CONSTRAINT fk_deployment_versions_position FOREIGN KEY ("position") REFERENCES public.deployments("position");
ALTER TABLE ONLY public.events
    ADD CONSTRAINT fk_events_position FOREIGN KEY ("position") REFERENCES public.jobs("position");
ALTER TABLE ONLY public.job_tags
    ADD CONSTRAINT fk_job_tags_position FOREIGN KEY ("position") REFERENCES public.jobs("position");
ALTER TABLE ONLY public.measurements
    ADD CONSTRAINT fk_measurements_position FOREIGN KEY ("position") REFERENCES public.deployments("position");
ALTER TABLE ONLY public.models
    ADD CONSTRAINT fk_models_position FOREIGN KEY ("position") REFERENCES public.jobs("position");
ALTER TABLE ONLY public.problems
    ADD CONSTRAINT fk_problems_position FOREIGN KEY ("position") REFERENCES public.jobs("position");
ALTER TABLE ONLY public.questions
    ADD CONSTRAINT fk_questions_position FOREIGN KEY ("position") REFERENCES public.jobs("position");
ALTER TABLE ONLY public.schedules
    ADD CONSTRAINT fk_schedules_position FOREIGN KEY ("position") REFERENCES public.jobs("position");
ALTER TABLE ONLY public.tuned
    ADD CONSTRAINT fk_tuned_position FOREIGN KEY ("position") REFERENCES public.jobs("position");
