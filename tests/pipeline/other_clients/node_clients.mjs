// The official client of OpenAI for Node and Vercel's AI SDK: `node node_clients.mjs openai|vercel`, with the request as JSON in REQUEST.
// What they got goes to standard output as JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const { url, model, question, picture, schema } = JSON.parse(process.env.REQUEST);
const messages = [{ role: "user", content: question }];
const drawing = [{ role: "user", content: "Draw something." }];

async function joined(stream, piece) {
  let text = "";
  let count = 0;
  for await (const part of stream) {
    const more = piece(part);
    text += more;
    count += more ? 1 : 0;
  }
  return { text, count };
}

async function openai() {
  const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
  const greedy = { model, temperature: 0, max_tokens: 24 };
  const whole = await client.chat.completions.create({ ...greedy, messages });
  const stream = await client.chat.completions.create({ ...greedy, messages, stream: true });
  const streamed = await joined(stream, (chunk) => chunk.choices[0]?.delta.content ?? "");
  const response = await client.responses.create({ model, temperature: 0, max_output_tokens: 24, input: question });
  const events = client.responses.stream({ model, temperature: 0, max_output_tokens: 24, input: question });
  const pieces = await joined(events, (event) => (event.type === "response.output_text.delta" ? event.delta : ""));
  const seen = await client.chat.completions.create({
    ...greedy,
    messages: [{ role: "user", content: [{ type: "image_url", image_url: { url: picture } }, { type: "text", text: question }] }],
  });
  const forced = {
    ...greedy,
    max_tokens: 160,
    messages: drawing,
    tools: [{ type: "function", function: { name: "draw", parameters: schema } }],
    tool_choice: { type: "function", function: { name: "draw" } },
  };
  const called = await client.chat.completions.create(forced);
  const headers = { "Idempotency-Key": `node-${process.pid}` };
  const first = await client.chat.completions.create({ ...greedy, temperature: 1, messages }, { headers });
  const again = await client.chat.completions.create({ ...greedy, temperature: 1, messages }, { headers });
  let refused = null;
  try {
    await client.embeddings.create({ model, input: question });
  } catch (error) {
    refused = { name: error.constructor.name, status: error.status, message: error.message };
  }
  const names = (await client.models.list()).data.map((one) => one.id);
  return {
    texts: [whole.choices[0].message.content, streamed.text, response.output_text, pieces.text],
    counts: [streamed.count, pieces.count],
    seen: seen.choices[0].message.content,
    call: called.choices[0].message.tool_calls[0].function,
    ids: [first.id, again.id],
    refused,
    names,
  };
}

async function vercel() {
  const provider = createOpenAICompatible({ name: "mmd", baseURL: url, apiKey: "none", supportsStructuredOutputs: true });
  const greedy = { model: provider(model), temperature: 0, maxOutputTokens: 24, maxRetries: 0 };
  const whole = await generateText({ ...greedy, prompt: question });
  const streamed = await joined(streamText({ ...greedy, prompt: question }).textStream, (part) => part);
  const content = [{ type: "image", image: picture }, { type: "text", text: question }];
  const seen = await generateText({ ...greedy, messages: [{ role: "user", content }] });
  const shape = z.object({ color: z.enum(["red", "green", "blue"]), sides: z.union([z.literal(3), z.literal(4)]) });
  const longer = { ...greedy, maxOutputTokens: 160, prompt: "Draw something." };
  const draw = tool({ description: "Draws a shape.", inputSchema: shape, execute: async () => "done" });
  const called = await generateText({
    ...longer,
    tools: { draw },
    toolChoice: { type: "tool", toolName: "draw" },
    stopWhen: stepCountIs(1),
  });
  const formed = await generateText({ ...longer, output: Output.object({ schema: shape }) });
  return {
    texts: [whole.text, streamed.text],
    counts: [streamed.count],
    seen: seen.text,
    call: called.toolCalls.map((call) => ({ name: call.toolName, arguments: call.input }))[0],
    results: called.toolResults.length,
    formed: formed.output,
    usage: whole.usage,
  };
}

console.log(JSON.stringify(await { openai, vercel }[process.argv[2]]()));
