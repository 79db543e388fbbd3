# /// script
# requires-python = ">=3.11"
# dependencies = ["pydantic-ai-slim[openai]==2.68.0"]
# ///
"""A whole loop of Pydantic AI: question, call of a tool, its result, answer."""

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

model = OpenAIChatModel("tiny")
agent = Agent(model, model_settings={"temperature": 0, "seed": 0})


@agent.tool_plain
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    print(f"get_weather: {city}")
    return "21 degrees, sunny"


print(agent.run_sync("What is the weather in Paris?").output)
