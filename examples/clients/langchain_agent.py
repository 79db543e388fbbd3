# /// script
# requires-python = ">=3.11"
# dependencies = ["langchain==1.5.2", "langchain-openai==1.7.4"]
# ///
"""A whole loop of LangChain's ``create_agent``: question, call of a tool, its result, answer."""

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    print(f"get_weather: {city}")
    return "21 degrees, sunny"


model = ChatOpenAI(model="tiny", temperature=0, seed=0)
agent = create_agent(model, [get_weather])
question = {"role": "user", "content": "What is the weather in Paris?"}
print(agent.invoke({"messages": [question]})["messages"][-1].content)
