// The official Node client at work for tests/kit/node_client.py: one JSON object a line comes in on
// standard input, {do, ...what it needs}, and one goes out, {value} or {error}. It asserts nothing;
// what each answer must be stands in the Python tests.

import { createHash } from 'node:crypto';
import { createReadStream } from 'node:fs';
import { createInterface } from 'node:readline';
import { setTimeout as sleep } from 'node:timers/promises';

import OpenAI, { toFile } from 'openai';

const ENDED = new Set(['completed', 'failed', 'expired', 'cancelled']);

/** A client as a user makes it, but for its `sent`: method, path, content type of each request. */
function clientFor({ base_url: baseURL, api_key: apiKey = 'anything' }) {
  const sent = [];
  const client = new OpenAI({
    apiKey,
    baseURL,
    webhookSecret: null,
    fetch: (url, init) => {
      const headers = new Headers(init.headers);
      sent.push({
        method: init.method.toUpperCase(),
        path: new URL(url).pathname,
        content_type: headers.get('content-type'),
      });
      return fetch(url, init);
    },
  });
  return { client, sent };
}

/** What a user sees of a failed call. */
async function refusal(call) {
  try {
    await call();
  } catch (error) {
    if (!(error instanceof OpenAI.APIError)) throw error;
    return {
      kind: error.constructor.name,
      status: error.status,
      message: error.message,
      code: error.code,
      param: error.param,
      type: error.type,
      request_id: error.requestID,
      header: error.headers.get('x-request-id'),
      should_retry: error.headers.get('x-should-retry'),
    };
  }
  throw new Error('the call was not refused');
}

async function poll(client, id, seconds = 40) {
  const deadline = Date.now() + seconds * 1000;
  const statuses = [];
  for (;;) {
    const batch = await client.batches.retrieve(id);
    if (statuses.at(-1) !== batch.status) statuses.push(batch.status);
    if (ENDED.has(batch.status)) return { batch, statuses };
    if (Date.now() > deadline) throw new Error(`not ended in time: ${JSON.stringify(batch)}`);
    await sleep(20);
  }
}

async function hashOf(response) {
  const hash = createHash('sha256');
  for await (const chunk of response.body) hash.update(chunk);
  return hash.digest('hex');
}

const SCENARIOS = {
  async version() {
    return { node: process.version };
  },

  // The order of the keys is the order of the form's parts: file first, purpose last.
  async upload_stream(given) {
    const { client } = clientFor(given);
    const { data: file, request_id } = await client.files
      .create({ file: createReadStream(given.path), purpose: given.purpose })
      .withResponse();
    const response = await client.files.content(file.id);
    return {
      file,
      request_id,
      own_request_id: file._request_id,
      content_type: response.headers.get('content-type'),
      sha256: await hashOf(response),
    };
  },

  async upload_bytes(given) {
    const { client } = clientFor(given);
    const data = Buffer.from(given.base64, 'base64');
    const file = await client.files.create({
      file: given.name === undefined ? await toFile(data) : await toFile(data, given.name),
      purpose: given.purpose,
      ...(given.expires_after && { expires_after: given.expires_after }),
    });
    return { file };
  },

  async list_files(given) {
    const { client, sent } = clientFor(given);
    const ids = [];
    for await (const file of client.files.list(given.query)) ids.push(file.id);
    return { ids, pages: sent.length };
  },

  async list_batches(given) {
    const { client, sent } = clientFor(given);
    const ids = [];
    for await (const batch of client.batches.list(given.query)) ids.push(batch.id);
    return { ids, pages: sent.length };
  },

  async run_batch(given) {
    const { client } = clientFor(given);
    const created = await client.batches.create(given.batch);
    const { batch, statuses } = await poll(client, created.id);
    const texts = {};
    for (const name of ['output_file_id', 'error_file_id']) {
      texts[name] = batch[name] === null ? null : await (await client.files.content(batch[name])).text();
    }
    return { created, batch, statuses, texts };
  },

  async cancel_running(given) {
    const { client, sent } = clientFor(given);
    const cancelling = await client.batches.cancel(given.batch_id);
    const { batch } = await poll(client, given.batch_id);
    const again = await client.batches.cancel(given.batch_id);
    return { cancelling, batch, again, cancels: sent.filter((one) => one.path.endsWith('/cancel')) };
  },

  async refused(given) {
    const { client, sent } = clientFor(given);
    const call = {
      cancel: () => client.batches.cancel(given.id),
      retrieve_batch: () => client.batches.retrieve(given.id),
      retrieve_file: () => client.files.retrieve(given.id),
      content: () => client.files.content(given.id),
      create_batch: () => client.batches.create(given.batch),
      create_file: async () =>
        client.files.create({ file: await toFile(Buffer.from('{}\n'), 'a'), purpose: given.purpose }),
      list_files: () => client.files.list(given.query),
      online: () => client.post('/nothing', { body: {} }),
    }[given.call];
    return { error: await refusal(call), requests: sent.length };
  },

  async request_ids(given) {
    const { client } = clientFor(given);
    const { data, response, request_id } = await client.files.retrieve(given.id).withResponse();
    return { own: data._request_id, given: request_id, header: response.headers.get('x-request-id') };
  },

  async delete_file(given) {
    const { client } = clientFor(given);
    const file = await client.files.create({ file: await toFile(Buffer.from('{}\n'), 'a'), purpose: 'evals' });
    return { id: file.id, deleted: await client.files.delete(file.id) };
  },

  async wait_for_processing(given) {
    const { client } = clientFor(given);
    const file = await client.files.waitForProcessing(given.id, { maxWait: 10_000 });
    return { file };
  },

  // All parts at once, so that they arrive in any order; the ids say the order that is meant.
  async upload_parts(given) {
    const { client } = clientFor(given);
    const parts = given.parts.map((part) => Buffer.from(part, 'base64'));
    const upload = await client.uploads.create({
      filename: given.filename,
      purpose: given.purpose,
      mime_type: 'application/jsonl',
      bytes: parts.reduce((sum, part) => sum + part.length, 0),
    });
    const made = await Promise.all(
      parts.map(async (part) =>
        client.uploads.parts.create(upload.id, { data: await toFile(part, 'part') }),
      ),
    );
    const part_ids = given.order.map((index) => made[index].id);
    const completed = await client.uploads.complete(upload.id, { part_ids });
    const response = await client.files.content(completed.file.id);
    return { upload, parts: made, completed, sha256: await hashOf(response) };
  },

  async unwrap(given) {
    const { client } = clientFor({ base_url: 'http://127.0.0.1:9/v1' });
    try {
      return { event: await client.webhooks.unwrap(given.body, given.headers, given.secret) };
    } catch (error) {
      return { refused: error.constructor.name };
    }
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { do: name, ...given } = JSON.parse(line);
  let answer;
  try {
    answer = { value: await SCENARIOS[name](given) };
  } catch (error) {
    answer = { error: `${error.stack}` };
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
