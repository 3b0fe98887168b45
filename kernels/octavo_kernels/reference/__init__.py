"""Every kernel in plain torch: obvious, any dtype, the measure of the other backends."""
