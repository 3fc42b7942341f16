"""Fixtures that every room may use. Kept here because pytest takes plugins only from the top-most conftest."""

pytest_plugins = ["tests.support.nats_fixture", "tests.support.observed_fixture", "tests.support.legs"]
