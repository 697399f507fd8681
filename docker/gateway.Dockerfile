# The gateway alone, in front of vLLM servers that run elsewhere. From the checkout's root:
#
#     docker build -f docker/gateway.Dockerfile -t radixgate .
#     docker run -p 8080:8080 radixgate --worker http://gpu-1:8000 --worker http://gpu-2:8000

ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /build
# Without pip: this one's installs into it, and the image needs none.
RUN python -m venv --without-pip /opt/radixgate
# The lock first, so that a change of the sources does not install it again.
COPY requirements/gateway.txt requirements/
RUN pip --python /opt/radixgate/bin/python install --no-cache-dir --no-deps \
        -r requirements/gateway.txt
COPY pyproject.toml README.md LICENSE ./
COPY cache_router cache_router
COPY engine_workers engine_workers
COPY gateway gateway
COPY radixgate radixgate
RUN pip --python /opt/radixgate/bin/python install --no-cache-dir --no-deps \
        --no-build-isolation . \
    && pip --python /opt/radixgate/bin/python uninstall --yes \
        editables hatchling pathspec pluggy tomlkit trove-classifiers

FROM ${PYTHON_IMAGE}
RUN useradd --system --uid 10001 --create-home radixgate
COPY --from=build /opt/radixgate /opt/radixgate
ENV PATH=/opt/radixgate/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
WORKDIR /home/radixgate
EXPOSE 8080
# http.client and not urllib: a proxy that the environment names must not be asked.
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s CMD ["python", "-c", "\
import http.client, os, sys; \
port = int(os.environ.get('RADIXGATE_PORT', 8080)); \
gateway = http.client.HTTPConnection('127.0.0.1', port, timeout=2); \
gateway.request('GET', '/live'); \
sys.exit(gateway.getresponse().status != 200)"]
ENTRYPOINT ["radixgate", "gateway", "--host", "0.0.0.0"]
