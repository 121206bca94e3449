// Runs a command if weir admits it, by weir's own protocol, and for as long as it takes.
//
//     node lease.mjs HOST:PORT ACCOUNT COMMAND…

import { spawn } from "node:child_process";
import { randomUUID } from "node:crypto";
import { once } from "node:events";
import { setTimeout as sleep } from "node:timers/promises";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const TIMEOUT = 1000 * (process.env.WEIR_TIMEOUT ?? 1); // ms, of each call
const ATTEMPTS = 4;
const PATIENCE = 30_000; // ms, over all attempts
const ESTIMATE = 10; // lines that a command prints, which are what it costs
const LONGEST = 24 * 3600_000; // ms, of waiting for the next renewal: a timer of more than 24.8 days fires at once
const AWAY = [grpc.status.UNAVAILABLE, grpc.status.DEADLINE_EXCEEDED];

let unchecked = 0; // how often work began without weir's word: a metric to alert on

const { weir } = grpc.loadPackageDefinition(
  protoLoader.loadSync("weir/v1/lease.proto", {
    includeDirs: [import.meta.dirname], // it is beside this program
    defaults: true,
    enums: String,
    longs: Number,
  }),
);

const ms = (duration) => duration.seconds * 1000 + duration.nanos / 1e6;

// weir's no. retryAfter: ms, or undefined if asking again can't help.
class Refused extends Error {
  constructor(verdict) {
    super(`refused: ${verdict.reason}, class ${verdict.class.replace("CLASS_", "").toLowerCase()}`);
    if (verdict.retryable) this.retryAfter = ms(verdict.retryAfter);
  }
}

// Calls with a deadline.
function call(client, method, request) {
  return new Promise((resolve, reject) => {
    const deadline = Date.now() + TIMEOUT;
    client[method](request, { deadline }, (error, answer) => (error ? reject(error) : resolve(answer)));
  });
}

// Returns the lease, or null if there is nothing to release. Throws Refused.
// Asks once more if there is no answer: what the operation took, it takes once.
async function ask(leases, request) {
  let answer;
  for (const last of [false, true]) {
    request.attempt++;
    try {
      answer = await call(leases, "Acquire", request);
      break;
    } catch (error) {
      if (!AWAY.includes(error.code)) throw error; // a mistake in the request or in the set-up
      if (last) {
        unchecked++;
        console.error(`weir is away, ${grpc.status[error.code]}: unchecked ${unchecked}`);
        return null;
      }
      console.error(`no answer, ${grpc.status[error.code]}: asking again`);
    }
  }
  if (!answer.admitted) throw new Refused(answer.verdict);
  return answer.lease;
}

// Asks again when weir said that it helps, and a little later, so that not all come at once.
async function askPatiently(...args) {
  const end = performance.now() + PATIENCE;
  for (let attempt = 1; ; attempt++) {
    try {
      return await ask(...args);
    } catch (refused) {
      if (refused.retryAfter === undefined || attempt === ATTEMPTS) throw refused;
      const wait = refused.retryAfter + 250 * Math.random();
      if (performance.now() + wait > end) throw refused;
      console.error(`${refused.message}; again in ${(wait / 1000).toFixed(2)} s`);
      await sleep(wait);
    }
  }
}

// Renews the lease until ended is aborted, and calls lost if it is gone.
async function keep(leases, lease, ended, lost) {
  let wait = lease.renewAfter;
  while (await sleep(Math.min(ms(wait), LONGEST), true, { signal: ended }).catch(() => false)) {
    try {
      const { results: [result] } = await call(leases, "Renew", { leaseIds: [lease.id] });
      if (result.status === "RENEW_STATUS_LOST") {
        console.error("the lease is lost: stopping");
        return lost();
      }
      if (result.status === "RENEW_STATUS_RENEWED") wait = result.renewAfter;
    } catch (error) {
      console.error(`renew: ${grpc.status[error.code]}`); // there is time for one more try
    }
  }
}

// Gives the slots back, and tells what was used. It has deadlines of its own, and never throws.
async function release(leases, lease, outcome, used) {
  const usage = [{ leaseId: lease.id, limits: [{ hits: used }] }]; // of each limit that reserved
  for (const pause of [0, 100, 500]) {
    await sleep(pause);
    try {
      const answer = await call(leases, "Release", { leaseIds: [lease.id], outcome, usage });
      const settled = answer.usage[0].limits[0].status !== "SETTLEMENT_STATUS_UNAVAILABLE";
      if (settled && answer.results[0].status !== "RELEASE_STATUS_UNAVAILABLE") return;
    } catch (error) {
      console.error(`release: ${grpc.status[error.code]}`);
    }
  }
  console.error("not released: the slot is free when its lease expires");
}

const [address, account, ...command] = process.argv.slice(2);
const request = {
  domain: "inference",
  operationId: randomUUID(),
  attempt: 0,
  descriptors: [
    { entries: [{ key: "account", value: account }] },
    { entries: [{ key: "pool", value: "images" }] },
    { entries: [{ key: "lines", value: account }], hits: ESTIMATE },
  ],
};
const leases = new weir.v1.LeaseService(address, grpc.credentials.createInsecure()); // for the whole process
try {
  const lease = await askPatiently(leases, request);
  const ended = new AbortController();
  let used = 0;
  process.exitCode = 1;
  try {
    const work = spawn(command[0], command.slice(1), { stdio: ["inherit", "pipe", "inherit"] }); // your work
    if (lease) keep(leases, lease, ended.signal, () => work.kill());
    process.stdout.on("error", () => work.kill()); // nobody reads any more
    work.stdout.on("data", (bytes) => { // which may be no text
      process.stdout.write(bytes);
      used += bytes.filter((byte) => byte === 10).length; // ends of lines
    });
    const [status] = await once(work, "close");
    process.exitCode = status ?? 1; // null: a signal ended it
  } finally {
    ended.abort();
    if (lease) await release(leases, lease, process.exitCode === 0 ? "ok" : "error", used);
  }
} catch (error) {
  if (!(error instanceof Refused)) throw error;
  console.error(error.message);
  process.exitCode = 1;
} finally {
  leases.close();
}
