"""The command of the benchmark."""

from benchmarks.scale.benchmark import BENCHMARK

raise SystemExit(BENCHMARK.main())
