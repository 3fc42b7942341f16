"""Fixtures that every suite may use. Kept here because pytest takes plugins only from the top-most conftest."""

pytest_plugins = ["support.servers.nats_fixture", "support.serving.observed_fixture", "support.harness.legs"]
