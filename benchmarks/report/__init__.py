"""One HTML page of all results: `page` builds it, `html` has its parts, `aims` the bounds of all figures."""
