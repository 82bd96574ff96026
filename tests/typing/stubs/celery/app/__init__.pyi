from celery.app.task import Task as Task
