# What is different in the demo from ../envoy/envoy.yaml. `make verify` checks that each line still finds its place.

# Each has a machine of its own.
/port_value: 10000/s/127\.0\.0\.1/0.0.0.0/
/port_value: 9000/s/127\.0\.0\.1/imageservice/
/port_value: 8081/s/127\.0\.0\.1/weir/

# Leases of 10 s, and a laptop's patience.
s/access_log_flush_interval: 30s/access_log_flush_interval: 3s/
s/timeout: 0.3s/timeout: 1s/
s/max_interval: 0.3s/max_interval: 1s/
