"""The operator: one DataParallelDeployment in, groups of vLLM data-parallel ranks out."""
