"""The gRPC front side: servers, servicers, and the translation to and from protobuf."""
