# The image of docker-compose.yml: celery_budget as a wheel, and the FastAPI example as the application.
FROM python:3.13-slim AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY celery_budget celery_budget
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.13-slim AS packages
COPY --from=wheel /wheels /wheels
# Without pip in it.
RUN python -m venv --without-pip /opt/app \
    && python -m pip --python /opt/app/bin/python install --no-cache-dir \
       "celery-budget[dashboard,postgres,prometheus,redis] @ file://$(ls /wheels/*.whl)" "fastapi>=0.110"

FROM python:3.13-slim AS runtime
ENV PATH=/opt/app/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Volumes take over whose these folders are.
RUN groupadd --gid 10001 app \
    && useradd --uid 10001 --gid app --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin app \
    && install --directory --owner app --group app /var/spool/budget /var/lib/beat
COPY --from=packages /opt/app /opt/app
WORKDIR /app
COPY examples examples
USER 10001:10001
# What it runs unless told something else, as docker-compose.yml does, with a health check to fit.
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=10s --start-period=30s \
    CMD ["python", "-m", "examples.compose.probe", "http://127.0.0.1:8000/health"]
CMD ["uvicorn", "examples.compose.served:api", "--host", "0.0.0.0", "--port", "8000"]
