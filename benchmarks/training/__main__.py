"""The command of the benchmark."""

from benchmarks.training.benchmark import BENCHMARK

raise SystemExit(BENCHMARK.main())
