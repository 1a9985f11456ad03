"""Programs as written for stock torch: `test_programs` runs each as it stands and with our name in it."""
