"""The gateway as a process: joins its parts, follows its settings, drains it, and serves administrators. Nothing else imports it."""
