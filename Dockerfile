# The server, in an image without compilers and without root: docker build -t topicstore .
# The guide to production (framework/guides/production.md) has the commands for users, tokens and certificates.
FROM python:3.13-slim AS build
WORKDIR /src
RUN python -m venv /opt/topicstore
COPY .ci/constraints.txt .ci/constraints.txt
COPY pyproject.toml README.md LICENSE ./
COPY framework framework
COPY backends backends
COPY layouts layouts
COPY conformance conformance
COPY benchmarks benchmarks
RUN /opt/topicstore/bin/pip install --no-cache-dir --constraint .ci/constraints.txt '.[server]'

FROM python:3.13-slim
RUN groupadd --system --gid 1883 topicstore \
 && useradd --system --uid 1883 --gid topicstore --home-dir /var/lib/topicstore --create-home \
    --shell /usr/sbin/nologin topicstore
COPY --from=build /opt/topicstore /opt/topicstore
COPY examples/deployment/container.toml /etc/topicstore/server.toml
ENV PATH=/opt/topicstore/bin:$PATH
USER topicstore
WORKDIR /var/lib/topicstore
VOLUME /var/lib/topicstore
EXPOSE 1883 8883 18083
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:18083/health/ready', timeout=4)"]
ENTRYPOINT ["topicstore"]
CMD ["serve", "--config", "/etc/topicstore/server.toml"]
