"""The command of the benchmark."""

from benchmarks.tenants.benchmark import BENCHMARK

raise SystemExit(BENCHMARK.main())
