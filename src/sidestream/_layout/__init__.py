"""The plans of saves and loads: flattening, layout, matching, ranges. This package does no I/O."""
