"""Memory: `predict` a step's needs, climb the `ladder` of changes that lower them, `watch` what really happens."""
