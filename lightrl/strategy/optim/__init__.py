"""Optimizers, schedules and clipping; and the optional parts of an update, which attach as hooks."""
