BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0008');
CREATE TABLE api_keys (
	id VARCHAR(16) NOT NULL, 
	name VARCHAR(100) NOT NULL, 
	role VARCHAR(16) NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	created_at DOUBLE NOT NULL, 
	revoked_at DOUBLE, 
	CONSTRAINT pk_api_keys PRIMARY KEY (id), 
	CONSTRAINT uq_api_keys_name UNIQUE (name)
);
INSERT INTO "api_keys" VALUES('33c938239b02','ci','submit','81c35c106ef926ffc240696b9d6889dfea0987d3dbef109192987d09b989b582',1000000.0,NULL);
INSERT INTO "api_keys" VALUES('a8de491ec3f8','gone','read','99788029f2a606d5c7ad80d70362c9e68377e5d0382c5ff476d2013c2bd565af',1000000.0,1000000.0);
CREATE TABLE batches (
	position INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	id VARCHAR(32) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	owner VARCHAR(100) NOT NULL, 
	idempotency_key VARCHAR(255), 
	created_at DOUBLE NOT NULL, 
	request_hash VARCHAR(80) NOT NULL, 
	document TEXT NOT NULL, 
	CONSTRAINT uq_batches_id UNIQUE (id), 
	CONSTRAINT uq_batches_idempotency_key UNIQUE (idempotency_key)
);
INSERT INTO "batches" VALUES(1,'ee5e73fc7a884e9ab46001311f90bc1a','sweep','ann',NULL,1000000.0,'sha256:sweep','{"axes":{"memory_scale":[1,0.5]},"options":{"time_limit_s":5.0,"work_limit":null,"threads":2,"seed":0,"gap":1e-06,"method":"auto","cache":"use","robust":null,"jitter":0.1,"stragglers":0.1,"chunks":null,"placements":null,"workload":null},"tags":["t"],"priority":0,"items":[{"values":{"memory_scale":1},"memory_bytes":[7],"family":"f","tighter":[1]},{"values":{"memory_scale":0.5},"memory_bytes":[7],"family":"f","tighter":[]}]}');
CREATE TABLE checkpoints (
	position INTEGER NOT NULL, 
	document TEXT NOT NULL, 
	CONSTRAINT pk_checkpoints PRIMARY KEY (position), 
	CONSTRAINT fk_checkpoints_position FOREIGN KEY(position) REFERENCES jobs (position)
);
INSERT INTO "checkpoints" VALUES(4,'search of tuned');
CREATE TABLE comparisons (
	position INTEGER NOT NULL, 
	document TEXT NOT NULL, 
	CONSTRAINT pk_comparisons PRIMARY KEY (position), 
	CONSTRAINT fk_comparisons_position FOREIGN KEY(position) REFERENCES jobs (position)
);
INSERT INTO "comparisons" VALUES(3,'rows of compared');
CREATE TABLE deployment_versions (
	position INTEGER NOT NULL, 
	version INTEGER NOT NULL, 
	created_at DOUBLE NOT NULL, 
	reason TEXT NOT NULL, 
	job_id VARCHAR(32) NOT NULL, 
	predicted_ms DOUBLE NOT NULL, 
	measured_ms DOUBLE, 
	num_measured INTEGER NOT NULL, 
	schedule TEXT NOT NULL, 
	CONSTRAINT pk_deployment_versions PRIMARY KEY (position, version), 
	CONSTRAINT fk_deployment_versions_position FOREIGN KEY(position) REFERENCES deployments (position)
);
INSERT INTO "deployment_versions" VALUES(1,1,1000000.0,'registered','d099631f3a07410495da07baeae3dfc4',8.0,8.5,1,'schedule of run');
CREATE TABLE deployments (
	position INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	id VARCHAR(32) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	owner VARCHAR(100) NOT NULL, 
	idempotency_key VARCHAR(255), 
	created_at DOUBLE NOT NULL, 
	ended_at DOUBLE, 
	request_hash VARCHAR(80) NOT NULL, 
	options TEXT NOT NULL, 
	problem TEXT NOT NULL, 
	measured TEXT, 
	planned TEXT NOT NULL, 
	planned_ms DOUBLE, 
	version INTEGER NOT NULL, 
	job_reason TEXT, 
	job_id VARCHAR(32), 
	num_solves INTEGER NOT NULL, 
	num_seen INTEGER NOT NULL, 
	error TEXT, 
	num_reports INTEGER NOT NULL, 
	num_judged INTEGER NOT NULL, 
	current_ms DOUBLE, 
	expected_ms DOUBLE, 
	CONSTRAINT uq_deployments_id UNIQUE (id), 
	CONSTRAINT uq_deployments_idempotency_key UNIQUE (idempotency_key)
);
INSERT INTO "deployments" VALUES(1,'a2355d0c48314e179d964901d2fbc73f','run','ci',NULL,1000000.0,NULL,'sha256:run','{"job":{"time_limit_s":5.0,"work_limit":null,"threads":2,"seed":0,"gap":1e-06,"method":"auto","cache":"use","robust":null,"jitter":0.1,"stragglers":0.1,"chunks":null,"placements":null,"workload":null},"threshold":0.02}','problem of run','problem of run as measured','problem of run',8.0,1,'registered','d099631f3a07410495da07baeae3dfc4',1,1,NULL,1,0,NULL,NULL);
CREATE TABLE events (
	number INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	position INTEGER NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	at DOUBLE NOT NULL, 
	seconds DOUBLE, 
	method VARCHAR(100), 
	objective_ms DOUBLE, 
	bound_ms DOUBLE, 
	text TEXT, 
	CONSTRAINT fk_events_position FOREIGN KEY(position) REFERENCES jobs (position)
);
INSERT INTO "events" VALUES(1,1,'state',1000000.0,NULL,NULL,NULL,NULL,'queued');
INSERT INTO "events" VALUES(2,2,'state',1000000.0,NULL,NULL,NULL,NULL,'queued');
INSERT INTO "events" VALUES(3,3,'state',1000000.0,NULL,NULL,NULL,NULL,'queued');
INSERT INTO "events" VALUES(4,1,'state',1000000.0,NULL,NULL,NULL,NULL,'running');
INSERT INTO "events" VALUES(5,1,'incumbent',1000000.0,1.0,'ls',9.0,7.0,NULL);
INSERT INTO "events" VALUES(6,1,'incumbent',1000000.0,0.0,'ls',8.0,7.0,NULL);
INSERT INTO "events" VALUES(7,1,'state',1000000.0,NULL,NULL,NULL,NULL,'succeeded');
INSERT INTO "events" VALUES(8,2,'state',1000000.0,NULL,NULL,NULL,NULL,'running');
INSERT INTO "events" VALUES(9,2,'incumbent',1000000.0,0.0,'ls',6.0,NULL,NULL);
INSERT INTO "events" VALUES(10,2,'state',1000000.0,NULL,NULL,NULL,NULL,'succeeded');
INSERT INTO "events" VALUES(11,3,'state',1000000.0,NULL,NULL,NULL,NULL,'running');
INSERT INTO "events" VALUES(12,3,'state',1000000.0,NULL,NULL,NULL,NULL,'succeeded');
INSERT INTO "events" VALUES(13,4,'state',1000000.0,NULL,NULL,NULL,NULL,'queued');
INSERT INTO "events" VALUES(14,4,'state',1000000.0,NULL,NULL,NULL,NULL,'running');
INSERT INTO "events" VALUES(15,4,'log',1000000.0,NULL,NULL,NULL,NULL,'100 configurations');
INSERT INTO "events" VALUES(16,4,'incumbent',1000000.0,1.0,'ls',5.0,NULL,NULL);
INSERT INTO "events" VALUES(17,5,'state',1000000.0,NULL,NULL,NULL,NULL,'queued');
INSERT INTO "events" VALUES(18,5,'log',1000000.0,NULL,NULL,NULL,NULL,'started from a schedule of job 11111111111111111111111111111111');
INSERT INTO "events" VALUES(19,5,'incumbent',1000000.0,0.0,'zb',9.5,NULL,NULL);
INSERT INTO "events" VALUES(20,6,'state',1000000.0,NULL,NULL,NULL,NULL,'queued');
INSERT INTO "events" VALUES(21,7,'state',1000000.0,NULL,NULL,NULL,NULL,'queued');
INSERT INTO "events" VALUES(22,6,'state',1000000.0,NULL,NULL,NULL,NULL,'running');
INSERT INTO "events" VALUES(23,6,'incumbent',1000000.0,0.0,'ls',4.0,1.0,NULL);
INSERT INTO "events" VALUES(24,6,'state',1000000.0,NULL,NULL,NULL,NULL,'succeeded');
CREATE TABLE job_tags (
	position INTEGER NOT NULL, 
	tag VARCHAR(64) NOT NULL, 
	CONSTRAINT pk_job_tags PRIMARY KEY (position, tag), 
	CONSTRAINT fk_job_tags_position FOREIGN KEY(position) REFERENCES jobs (position)
);
INSERT INTO "job_tags" VALUES(1,'a');
INSERT INTO "job_tags" VALUES(1,'b');
CREATE TABLE jobs (
	position INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	id VARCHAR(32) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	problem_hash VARCHAR(80) NOT NULL, 
	objective VARCHAR(16) NOT NULL, 
	options TEXT NOT NULL, 
	idempotency_key VARCHAR(255), 
	created_at DOUBLE NOT NULL, 
	started_at DOUBLE, 
	finished_at DOUBLE, 
	cancel_requested BOOLEAN NOT NULL, 
	attempt INTEGER NOT NULL, 
	deaths INTEGER NOT NULL, 
	spent_s DOUBLE NOT NULL, 
	lease_owner VARCHAR(64), 
	lease_expires_at DOUBLE, 
	claimed_at DOUBLE, 
	objective_ms DOUBLE, 
	bound_ms DOUBLE, 
	error TEXT, kind VARCHAR(16) DEFAULT 'solve' NOT NULL, owner VARCHAR(100) DEFAULT '' NOT NULL, shape_hash VARCHAR(80) DEFAULT '' NOT NULL, priority INTEGER DEFAULT '0' NOT NULL, cache VARCHAR(8) DEFAULT 'miss' NOT NULL, source_id VARCHAR(32), batch_id VARCHAR(32), batch_index INTEGER, deployment_id VARCHAR(32), num_schedules INTEGER DEFAULT '0' NOT NULL, 
	CONSTRAINT uq_jobs_id UNIQUE (id), 
	CONSTRAINT uq_jobs_idempotency_key UNIQUE (idempotency_key)
);
INSERT INTO "jobs" VALUES(1,'d099631f3a07410495da07baeae3dfc4','succeeded','solved','sha256:solved','makespan','{"time_limit_s":5.0,"work_limit":null,"threads":2,"seed":0,"gap":1e-06,"method":"auto","cache":"use","robust":null,"jitter":0.1,"stragglers":0.1,"chunks":null,"placements":null,"workload":null}','e84c2994f6b9afdb98204e40ded273ca3030e30aad510abd18077640e4a6d1d4',1000000.0,1000000.0,1000000.0,0,1,0,0.0,NULL,NULL,NULL,8.0,7.0,NULL,'solve','ci','sha256:shape',0,'miss',NULL,NULL,NULL,NULL,2);
INSERT INTO "jobs" VALUES(2,'724af9be110c4ffd92c895b104e920a2','succeeded','planned','sha256:planned','makespan','{"time_limit_s":5.0,"work_limit":null,"threads":2,"seed":0,"gap":1e-06,"method":"auto","cache":"use","robust":null,"jitter":0.1,"stragglers":0.1,"chunks":null,"placements":null,"workload":null}',NULL,1000000.0,1000000.0,1000000.0,0,1,0,0.0,NULL,NULL,NULL,6.0,NULL,NULL,'plan','ci','sha256:shape',0,'miss',NULL,NULL,NULL,NULL,1);
INSERT INTO "jobs" VALUES(3,'f5c9ea98722641f5be982ef23da56d84','succeeded','compared','sha256:compared','makespan','{"time_limit_s":5.0,"work_limit":null,"threads":2,"seed":0,"gap":1e-06,"method":"auto","cache":"use","robust":null,"jitter":0.1,"stragglers":0.1,"chunks":null,"placements":null,"workload":null}',NULL,1000000.0,1000000.0,1000000.0,0,1,0,0.0,NULL,NULL,NULL,NULL,NULL,NULL,'compare','ci','sha256:shape',0,'miss',NULL,NULL,NULL,NULL,0);
INSERT INTO "jobs" VALUES(4,'1f23439d2f59408688a74ec6c13a5588','running','tuned','sha256:tuned','makespan','{"time_limit_s":5.0,"work_limit":null,"threads":2,"seed":0,"gap":1e-06,"method":"auto","cache":"use","robust":null,"jitter":0.1,"stragglers":0.1,"chunks":null,"placements":null,"workload":null}',NULL,1000000.0,1000000.0,NULL,0,1,0,0.0,'server',1000100.0,1000000.0,5.0,NULL,NULL,'tune','ci','sha256:shape',0,'miss',NULL,NULL,NULL,NULL,1);
INSERT INTO "jobs" VALUES(5,'ffc90950c2e247bcaef9a3d0611bec40','queued','waiting','sha256:waiting','makespan','{"time_limit_s":5.0,"work_limit":null,"threads":2,"seed":0,"gap":1e-06,"method":"auto","cache":"use","robust":null,"jitter":0.1,"stragglers":0.1,"chunks":null,"placements":null,"workload":null}',NULL,1000000.0,NULL,NULL,0,0,0,0.0,NULL,NULL,NULL,9.5,NULL,NULL,'solve','ci','sha256:shape',3,'near','11111111111111111111111111111111',NULL,NULL,NULL,1);
INSERT INTO "jobs" VALUES(6,'a92fd8c6815449fe87b3f23bbf8b0df9','succeeded','item 1','sha256:item 1','makespan','{"time_limit_s":5.0,"work_limit":null,"threads":2,"seed":0,"gap":1e-06,"method":"auto","cache":"use","robust":null,"jitter":0.1,"stragglers":0.1,"chunks":null,"placements":null,"workload":null}',NULL,1000000.0,1000000.0,1000000.0,0,1,0,0.0,NULL,NULL,NULL,4.0,1.0,NULL,'solve','ann','sha256:shape',0,'miss',NULL,'ee5e73fc7a884e9ab46001311f90bc1a',1,NULL,1);
INSERT INTO "jobs" VALUES(7,'a3e3e44f79c843e797eb27cd236e8006','queued','item 0','sha256:item 0','makespan','{"time_limit_s":5.0,"work_limit":null,"threads":2,"seed":0,"gap":1e-06,"method":"auto","cache":"use","robust":null,"jitter":0.1,"stragglers":0.1,"chunks":null,"placements":null,"workload":null}',NULL,1000000.0,NULL,NULL,0,0,0,0.0,NULL,NULL,NULL,NULL,NULL,NULL,'solve','ann','sha256:shape',0,'miss',NULL,'ee5e73fc7a884e9ab46001311f90bc1a',0,NULL,0);
CREATE TABLE measurements (
	number INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	position INTEGER NOT NULL, 
	at DOUBLE NOT NULL, 
	version INTEGER NOT NULL, 
	step INTEGER, 
	step_ms DOUBLE, 
	document TEXT NOT NULL, 
	CONSTRAINT fk_measurements_position FOREIGN KEY(position) REFERENCES deployments (position)
);
INSERT INTO "measurements" VALUES(1,1,1000000.0,1,NULL,8.5,'report of run');
CREATE TABLE models (
	position INTEGER NOT NULL, 
	document TEXT NOT NULL, 
	CONSTRAINT pk_models PRIMARY KEY (position), 
	CONSTRAINT fk_models_position FOREIGN KEY(position) REFERENCES jobs (position)
);
INSERT INTO "models" VALUES(2,'model of planned');
CREATE TABLE problems (
	position INTEGER NOT NULL, 
	document TEXT NOT NULL, 
	CONSTRAINT pk_problems PRIMARY KEY (position), 
	CONSTRAINT fk_problems_position FOREIGN KEY(position) REFERENCES jobs (position)
);
INSERT INTO "problems" VALUES(1,'problem of solved');
INSERT INTO "problems" VALUES(2,'cut of planned');
INSERT INTO "problems" VALUES(3,'problem of compared');
INSERT INTO "problems" VALUES(4,'cut of tuned');
INSERT INTO "problems" VALUES(5,'problem of waiting');
INSERT INTO "problems" VALUES(6,'problem of item 1');
INSERT INTO "problems" VALUES(7,'problem of item 0');
CREATE TABLE questions (
	position INTEGER NOT NULL, 
	document TEXT NOT NULL, 
	CONSTRAINT pk_questions PRIMARY KEY (position), 
	CONSTRAINT fk_questions_position FOREIGN KEY(position) REFERENCES jobs (position)
);
INSERT INTO "questions" VALUES(4,'question of tuned');
CREATE TABLE schedules (
	position INTEGER NOT NULL, 
	document TEXT NOT NULL, 
	CONSTRAINT pk_schedules PRIMARY KEY (position), 
	CONSTRAINT fk_schedules_position FOREIGN KEY(position) REFERENCES jobs (position)
);
INSERT INTO "schedules" VALUES(1,'schedule of 8 ms');
INSERT INTO "schedules" VALUES(2,'schedule of planned');
INSERT INTO "schedules" VALUES(4,'schedule of tuned');
INSERT INTO "schedules" VALUES(5,'schedule of near');
INSERT INTO "schedules" VALUES(6,'schedule of item 1');
CREATE TABLE tuned (
	position INTEGER NOT NULL, 
	document TEXT NOT NULL, 
	CONSTRAINT pk_tuned PRIMARY KEY (position), 
	CONSTRAINT fk_tuned_position FOREIGN KEY(position) REFERENCES jobs (position)
);
INSERT INTO "tuned" VALUES(4,'tuned so far');
CREATE TABLE turns (
	owner VARCHAR(100) NOT NULL, 
	number BIGINT NOT NULL, 
	CONSTRAINT pk_turns PRIMARY KEY (owner)
);
INSERT INTO "turns" VALUES('ci',4);
INSERT INTO "turns" VALUES('ann',5);
CREATE INDEX ix_jobs_batch_id_batch_index ON jobs (batch_id, batch_index);
CREATE INDEX ix_job_tags_tag_position ON job_tags (tag, position);
CREATE INDEX ix_events_position_number ON events (position, number);
CREATE INDEX ix_measurements_position_number ON measurements (position, number);
CREATE INDEX ix_jobs_state_position ON jobs (state, position);
CREATE INDEX ix_jobs_owner_position ON jobs (owner, position);
CREATE INDEX ix_jobs_owner_state_position ON jobs (owner, state, position);
CREATE INDEX ix_jobs_problem_hash_owner_position ON jobs (problem_hash, owner, position);
CREATE INDEX ix_jobs_shape_hash_owner_position ON jobs (shape_hash, owner, position);
CREATE INDEX ix_jobs_finished_at ON jobs (finished_at);
CREATE INDEX ix_deployments_owner_ended_at ON deployments (owner, ended_at);
CREATE INDEX ix_jobs_queue ON jobs (state, owner, priority DESC, position);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('events',24);
INSERT INTO "sqlite_sequence" VALUES('jobs',7);
INSERT INTO "sqlite_sequence" VALUES('batches',1);
INSERT INTO "sqlite_sequence" VALUES('deployments',1);
INSERT INTO "sqlite_sequence" VALUES('measurements',1);
COMMIT;
