"""The serving process: scheduler, executors, engine, gRPC front side and command line."""
