"""The command that writes the page."""

from benchmarks.report.page import main

raise SystemExit(main())
