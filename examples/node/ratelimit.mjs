// Runs a command if weir admits it, by Envoy's protocol.
//
//     node ratelimit.mjs HOST:PORT ACCOUNT COMMAND…

import { spawn } from "node:child_process";
import { once } from "node:events";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const TIMEOUT = 1000 * (process.env.WEIR_TIMEOUT ?? 1); // ms, of each call
const ATTEMPTS = 4;
const PATIENCE = 30_000; // ms, over all attempts
const AWAY = [grpc.status.UNAVAILABLE, grpc.status.DEADLINE_EXCEEDED];

let unchecked = 0; // how often work began without weir's word: a metric to alert on

// Envoy's files are in @grpc/grpc-js-xds; weir/v1/lease.proto is beside this program.
const envoys = import.meta.resolve("@grpc/grpc-js-xds/package.json");
const folders = ["deps/envoy-api", "deps/xds", "deps/protoc-gen-validate"];
const { envoy, weir } = grpc.loadPackageDefinition(
  protoLoader.loadSync(["envoy/service/ratelimit/v3/rls.proto", "weir/v1/lease.proto"], {
    includeDirs: [import.meta.dirname, ...folders.map((f) => fileURLToPath(new URL(f, envoys)))],
    defaults: true,
    enums: String,
    oneofs: true, // a value of the metadata tells its kind
  }),
);

// weir's no. retryAfter: ms, or undefined if asking again can't help.
class Refused extends Error {
  constructor(told) {
    super(`refused: ${told.reason}, class ${told.reject_class}`);
    if (told.retryable) this.retryAfter = told.retry_after_ms ?? 1000;
  }
}

// Calls with a deadline.
function call(client, method, request) {
  return new Promise((resolve, reject) => {
    const deadline = Date.now() + TIMEOUT;
    client[method](request, { deadline }, (error, answer) => (error ? reject(error) : resolve(answer)));
  });
}

// Returns the lease, or undefined if there is nothing to release. Throws Refused.
async function ask(limits, domain, descriptors) {
  const request = {
    domain,
    descriptors: descriptors.map((entries) => ({
      entries: Object.entries(entries).map(([key, value]) => ({ key, value })),
    })),
  };
  let answer;
  try {
    answer = await call(limits, "ShouldRateLimit", request);
  } catch (error) {
    if (!AWAY.includes(error.code)) throw error; // a mistake in the request or in the set-up
    unchecked++;
    console.error(`weir is away, ${grpc.status[error.code]}: unchecked ${unchecked}`);
    return undefined;
  }
  const fields = Object.entries(answer.dynamicMetadata?.fields ?? {});
  const told = Object.fromEntries(fields.map(([key, value]) => [key, value[value.kind]]));
  if (answer.overallCode === "OVER_LIMIT") throw new Refused(told);
  return told.lease_id;
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

// Gives the slots back. It has deadlines of its own, and never throws.
async function release(leases, lease, outcome) {
  for (const pause of [0, 100, 500]) {
    await sleep(pause);
    try {
      const answer = await call(leases, "Release", { leaseIds: [lease], outcome });
      if (answer.results[0].status !== "RELEASE_STATUS_UNAVAILABLE") return;
    } catch (error) {
      console.error(`release: ${grpc.status[error.code]}`);
    }
  }
  console.error("not released: the slot is free when its lease expires");
}

const [address, account, ...command] = process.argv.slice(2);
const credentials = grpc.credentials.createInsecure();
const limits = new envoy.service.ratelimit.v3.RateLimitService(address, credentials); // for the whole process
const leases = new weir.v1.LeaseService(address, credentials);
try {
  const lease = await askPatiently(limits, "inference", [{ account }, { pool: "images" }]);
  process.exitCode = 1;
  try {
    const work = spawn(command[0], command.slice(1), { stdio: "inherit" }); // your work
    const [status] = await once(work, "close");
    process.exitCode = status ?? 1; // null: a signal ended it
  } finally {
    if (lease) await release(leases, lease, process.exitCode === 0 ? "ok" : "error");
  }
} catch (error) {
  if (!(error instanceof Refused)) throw error;
  console.error(error.message);
  process.exitCode = 1;
} finally {
  limits.close();
  leases.close();
}
