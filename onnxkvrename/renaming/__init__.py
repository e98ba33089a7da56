"""The job: prepare all models, check them together, write all or none."""
