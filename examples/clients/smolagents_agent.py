# /// script
# requires-python = ">=3.11"
# dependencies = ["smolagents[openai]==1.26.0"]
# ///
"""A loop of smolagents' ``ToolCallingAgent``: question, demanded call, its result.

It shows the model calls and results as text, which the shipped checkpoint was not trained on: the
loop ends after the result. Its own system prompt is longer than that checkpoint's context, so it is
short here. Beside its tool ``final_answer`` the checkpoint calls ``get_current_weather`` rightly,
and not ``get_weather``.
"""

import os

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def get_current_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: The city
    """
    print(f"get_weather: {city}")
    return "21 degrees, sunny"


model = OpenAIModel("tiny", os.environ["OPENAI_BASE_URL"], temperature=0, seed=0)
agent = ToolCallingAgent([get_current_weather], model, verbosity_level=0)
agent.prompt_templates["system_prompt"] = "You are a helpful assistant."
agent.run("What is the weather in Paris?", max_steps=1)
_, step, *_ = agent.memory.steps
print(step.observations)
