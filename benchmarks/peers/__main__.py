"""The command of the benchmark."""

from benchmarks.peers.benchmark import BENCHMARK

raise SystemExit(BENCHMARK.main())
