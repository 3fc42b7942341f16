"""The gateway as a process: joins its parts, follows its settings, drains it, serves those who run it. Nothing else imports it."""
