"""A trainer that finds all hubs by the name of their Service."""

import envhub

envs = envhub.make_vec("CartPole-v1", 24, hub="dns://hubs:5555", on_hub_loss="recreate", reconnect_timeout=600)
observations, infos = envs.reset(seed=42)
for _ in range(1000):
    observations, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())
print("stepped", len(observations), "envs")
envs.close()
