"""Each layer's gradient and update, looked at now and then."""
