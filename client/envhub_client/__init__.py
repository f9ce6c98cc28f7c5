"""The client library: a Gymnasium ``VectorEnv`` whose envs live in a hub."""
