"""A verifiers environment that knows nothing of lightrl: its harness plays two turns with OpenAI's client."""

import openai
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult


class GuessData(vf.TaskData):
    wanted: str


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def said(self, trace: vf.Trace) -> float:
        answers = [str(node.message.content) for node in trace.nodes if node.message.role == "assistant"]
        return sum(answer == self.data.wanted for answer in answers) / 2


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        return [GuessTask(GuessData(prompt="=", wanted="9"), self.config.task) for _ in range(7)]


class TwoTurns(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                message = {"role": "assistant", "content": answer.choices[0].message.content}
                messages += [message, {"role": "user", "content": "="}]
        return ProgramResult(0, "", "")


__all__ = ["GuessTaskset", "TwoTurns"]
