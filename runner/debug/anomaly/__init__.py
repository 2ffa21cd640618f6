"""Which operation made a NaN or Inf first."""
