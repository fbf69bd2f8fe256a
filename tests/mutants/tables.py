"""All planted errors."""

from __future__ import annotations

from mutants import (
    bench_errors,
    evidence_errors,
    family_errors,
    flow_errors,
    lab_errors,
    learning_errors,
    model_errors,
    objective_errors,
    process_errors,
    report_errors,
    reward_errors,
    sentinel_errors,
    speed_errors,
    study_errors,
    training_errors,
)

MUTANTS = (
    *bench_errors.MUTANTS,
    *evidence_errors.MUTANTS,
    *family_errors.MUTANTS,
    *flow_errors.MUTANTS,
    *learning_errors.MUTANTS,
    *training_errors.MUTANTS,
    *model_errors.MUTANTS,
    *objective_errors.MUTANTS,
    *reward_errors.MUTANTS,
    *process_errors.MUTANTS,
    *lab_errors.MUTANTS,
    *speed_errors.MUTANTS,
    *report_errors.MUTANTS,
    *study_errors.MUTANTS,
    *sentinel_errors.MUTANTS,
)
