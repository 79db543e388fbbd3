# /// script
# requires-python = ">=3.11"
# dependencies = ["strands-agents[openai]==1.62.0"]
# ///
"""A whole loop of Strands Agents: question, call of a tool, its result, answer."""

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    print(f"get_weather: {city}")
    return "21 degrees, sunny"


model = OpenAIModel(model_id="tiny", params={"temperature": 0, "seed": 0})
# Without a handler it prints the text as it comes.
agent = Agent(model=model, tools=[get_weather], callback_handler=None)
print(agent("What is the weather in Paris?"))
