"""Tasks that their callers know and no worker does."""

from tests.apps.ends import make

for ack in ("late", "early"):
    make(f"ends.{ack}.unknown", acks_late=ack == "late")
