# The service: API and local solver processes, on SQLite under /data unless OPTPIPE_DATABASE_URL
# says otherwise. No torch: training nodes run the client, not this image.
#
# It listens on every address, and so starts only when its database holds an API key; make one with
#   docker run --rm -v optpipe:/data optpipe optpipe keys create --name me --role admin
#   docker run -d  -v optpipe:/data -p 8000:8000 optpipe

FROM python:3.11-slim AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/optpipe
ENV PATH=/opt/optpipe/bin:$PATH
WORKDIR /src

# Dependencies before code: this layer is built again only when they change. The stub packages
# let pip read the extras from pyproject.toml itself instead of from a second list.
COPY pyproject.toml constraints.txt LICENSE ./
RUN mkdir -p optpipe solver/optpipe_solver api/optpipe_api \
    && touch README.md optpipe/__init__.py solver/optpipe_solver/__init__.py api/optpipe_api/__init__.py \
    && pip install --constraint constraints.txt ".[server,postgres]" \
    && pip uninstall --yes optpipe

COPY README.md ./
COPY optpipe optpipe
COPY solver solver
COPY api api
RUN pip install --no-deps .


FROM python:3.11-slim
# A fixed uid, so that the owner of a mounted /data can be set from outside.
RUN groupadd --gid 10001 optpipe \
    && useradd --uid 10001 --gid optpipe --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin optpipe \
    && install --directory --owner optpipe --group optpipe /data
COPY --from=build /opt/optpipe /opt/optpipe
ENV PATH=/opt/optpipe/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    OPTPIPE_DATABASE_URL=sqlite:////data/optpipe.db \
    NUMBA_CACHE_DIR=/var/cache/numba
# Compiled here, because the user can write neither to the packages nor to a home. The folder is
# still the user's: on a processor unlike this one numba compiles again, and must write.
RUN python -c 'import optpipe_solver; optpipe_solver.warm_up()' && chown --recursive optpipe:optpipe "$NUMBA_CACHE_DIR"
WORKDIR /data
VOLUME /data
USER 10001:10001
EXPOSE 8000
# Python, because the image has no curl; http.client, because it ignores proxy variables.
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s --retries=3 \
    CMD ["python", "-c", "import http.client as h; c = h.HTTPConnection('127.0.0.1', 8000, timeout=4); c.request('GET', '/healthz'); raise SystemExit(c.getresponse().status != 200)"]
CMD ["optpipe", "serve", "--host", "0.0.0.0", "--port", "8000"]
