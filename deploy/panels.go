package deploy

// rows are the dashboard, from what to look at first to what is seldom asked. What all
// replicas tell alike (leases, slots) is their max, the rest their sum.
var rows = []row{
	{"Now: is it enforced?", []panel{
		{
			"stat", "Redis answers", "Whether Redis answers all replicas. AWAY: it does not answer at least one, which decides each limit by its failure mode. Since when: below.", "none", 3, 4,
			[]state{{0, "red", "AWAY"}, {1, "green", "up"}},
			[]query{{`min(weir_store_up{R})`, "Redis"}},
		},
		{
			"stat", "Bypassed now", "Limits that are decided without Redis, a second. Above 0: not enforced.", "cps", 3, 4,
			[]state{{0, "green", ""}, {1e-6, "red", ""}},
			[]query{{`sum(rate(weir_bypassed_total{D}[$__rate_interval]))`, "bypassed"}},
		},
		{
			"stat", "Bypassed in this time", "Limits that were decided without Redis, in the time that the dashboard shows.", "short", 3, 4,
			[]state{{0, "green", ""}, {0.5, "orange", ""}},
			[]query{{`sum(increase(weir_bypassed_total{D}[$__range]))`, "bypassed"}},
		},
		{
			"bargauge", "Fullest pools", "The three limits of one subject whose slots are taken most. At 100 % all who meet one are refused.", "percentunit", 6, 4,
			[]state{{0, "green", ""}, {0.9, "orange", ""}, {1, "red", ""}},
			[]query{{`topk(3, max by (domain, limit, subject) (weir_in_flight{D}) / max by (domain, limit, subject) (weir_max_in_flight{D}))`, "{{domain}} {{limit}} {{subject}}"}},
		},
		{
			"stat", "Refused now", "Requests that are refused, a second. That is what limits are for: look at it beside what is usual.", "reqps", 3, 4,
			[]state{{0, "green", ""}, {1e-6, "blue", ""}},
			[]query{{`sum(rate(weir_decisions_total{D, verdict="refused"}[$__rate_interval])) or 0 * sum(weir_ready{R})`, "refused"}},
		},
		{
			"stat", "Decided now", "Requests that are decided, a second.", "reqps", 3, 4,
			[]state{{0, "blue", ""}},
			[]query{{`sum(rate(weir_decisions_total{D}[$__rate_interval])) or 0 * sum(weir_ready{R})`, "decided"}},
		},
		{
			"stat", "Not ready", "Replicas that say that they may not be asked: their /healthz says why. Those that Prometheus does not see are not counted.", "none", 3, 4,
			[]state{{0, "green", ""}, {1, "red", ""}},
			[]query{{`count(weir_ready{R} == 0) or 0 * sum(weir_ready{R})`, "not ready"}},
		},
		{
			"state-timeline", "Redis, by replica", "Since when Redis does not answer, and whom: all, and it is Redis; one, and it is the network between.", "none", 12, 6,
			[]state{{0, "red", "AWAY"}, {1, "green", "up"}},
			[]query{{`max by (instance) (weir_store_up{R})`, "{{instance}}"}},
		},
		{
			"state-timeline", "Alerts", "Alerts of weir that fire. docs/runbook.md has an entry for each.", "none", 12, 6,
			[]state{{0, "green", ""}, {1, "red", "fires"}},
			[]query{{`max by (alertname, domain, limit) (ALERTS{alertname=~"(Weir|Envoy).*", alertstate="firing"})`, "{{alertname}} {{domain}} {{limit}}"}},
		},
	}},
	{"Decisions", []panel{
		graph("Decisions by domain and verdict", "Requests decided, bypassed ones too. Domain unknown is one that no policy has: it is not limited.", "reqps",
			query{`sum by (domain, verdict) (rate(weir_decisions_total{D}[$__rate_interval]))`, "{{domain}} {{verdict}}"}),
		graph("Refusals by limit", "Limits that refused, by class: lane is the caller's own (429), pool is what all share (503). A request may be refused by several. Unasked: Redis had just refused the same.", "cps",
			query{`sum by (domain, limit, class, reason) (rate(weir_refusals_total{D}[$__rate_interval]))`, "{{domain}} {{limit}}: {{class}}, {{reason}}"},
			query{`sum by (domain) (rate(weir_refused_unasked_total{D}[$__rate_interval]))`, "{{domain}} unasked"}),
		graph("Shadow: would have refused", "Limits in shadow_mode, or all with --shadow, that would have refused. Empty if none has since its replicas started.", "cps",
			query{`sum by (domain, limit) (rate(weir_checks_total{D, result="shadow_refused"}[$__rate_interval]))`, "{{domain}} {{limit}}"}),
		graph("Limits asked, by result", "passed; refused; over: did not pass, and the request was not refused for it; shadow_refused.", "cps",
			query{`sum by (kind, result) (rate(weir_checks_total{D}[$__rate_interval]))`, "{{kind}} {{result}}"}),
		graph("Bypassed, by mode and reason", "Limits decided without Redis. open lets pass, closed refuses, local allows each replica its share.", "cps",
			query{`sum by (domain, mode, reason) (rate(weir_bypassed_total{D}[$__rate_interval]))`, "{{domain}} {{mode}}: {{reason}}"}),
		graph("Asked again, and misuse", "Operations that asked again and were told of their lease; those that were not decided, by reason; requests for what weir does not do.", "cps",
			query{`sum by (domain) (rate(weir_replayed_total{D}[$__rate_interval]))`, "{{domain}} again"},
			query{`sum by (domain, reason) (rate(weir_operation_conflicts_total{D}[$__rate_interval]))`, "{{domain}} conflict: {{reason}}"},
			query{`sum by (domain, reason) (rate(weir_misuse_total{D}[$__rate_interval]))`, "{{domain}} misuse: {{reason}}"}),
	}},
	{"Slots and leases", []panel{
		graph("In flight against capacity", "Slots that are taken of limits of one subject, over all replicas, and how many there are.", "short",
			query{`max by (domain, limit, subject) (weir_in_flight{D})`, "{{domain}} {{limit}} {{subject}}"},
			query{`max by (domain, limit, subject) (weir_max_in_flight{D})`, "{{domain}} {{limit}} {{subject}} capacity"}),
		graph("Leases held", "Work in flight, over all replicas, lanes included.", "short",
			query{`max by (domain) (weir_leases_held{D})`, "{{domain}}"}),
		graph("Leases granted and ended", "What was granted, and what ended each: ratelimit_service and access_log are Envoy, lease_service a service, give_back weir, whose caller had gone, admin an operator. expired: nobody. resets: an operator had a subject's state forgotten.", "cps",
			query{`sum(rate(weir_leases_granted_total{D}[$__rate_interval]))`, "granted"},
			query{`sum by (by) (rate(weir_leases_ended_total{D}[$__rate_interval]))`, "ended by {{by}}"},
			query{`sum(rate(weir_leases_expired_total{D}[$__rate_interval]))`, "expired"},
			query{`sum(rate(weir_resets_total{D}[$__rate_interval]))`, "resets"}),
		graph("Leases expired", "The leak alarm: what nobody released, as a part of what was granted. Those that linger as they should are among them; lingering tells how many.", "cps",
			query{`sum by (domain) (rate(weir_leases_expired_total{D}[$__rate_interval]))`, "{{domain}} expired"},
			query{`sum by (domain) (rate(weir_leases_released_total{D, result="LINGERING"}[$__rate_interval]))`, "{{domain}} lingering"}),
		graph("Releases by result", "Envoy tells each end twice, by its filter and by its access log: RELEASED is the first, NOT_HELD the other. EXPIRED came too late.", "cps",
			query{`sum by (domain, result) (rate(weir_leases_released_total{D}[$__rate_interval]))`, "{{domain}} {{result}}"}),
		graph("Renewals, and callers that had gone", "lost: the holder works on without its slot. given back: the caller had gone before it was told of its lease.", "cps",
			query{`sum by (domain, result) (rate(weir_renewals_total{D}[$__rate_interval]))`, "{{domain}} {{result}}"},
			query{`sum by (domain) (rate(weir_leases_given_back_total{D}[$__rate_interval]))`, "{{domain}} given back"}),
		graph("Waiting for a slot", "Requests that waited for a slot of a full lane or pool, by verdict, and those that wait now (once for each full limit).", "short",
			query{`sum by (verdict) (rate(weir_waits_total{D}[$__rate_interval]))`, "{{verdict}}, a second"},
			query{`sum(weir_waiting{R})`, "waiting now"}),
		graph("How long they waited", "It is part of a decision's time.", "s", quantiles(`weir_wait_duration_seconds_bucket{D}`)...),
		graph("Envoy's access log", "Entries, by kind: end of a stream, renewal of one that goes on, ignored. broken: logs that ended without a word, as when an Envoy dies; its leases wait for their expiry.", "cps",
			query{`sum by (domain, kind) (rate(weir_access_log_entries_total{D}[$__rate_interval]))`, "{{domain}} {{kind}}"},
			query{`sum(rate(weir_access_logs_broken_total{R}[$__rate_interval]))`, "broken"}),
	}},
	{"Latency", []panel{
		graph("Latency of decisions", "From the request's policies to the verdict, with waiting for a slot. Envoy as in envoy/envoy.yaml waits 0.3 s, one without a timeout of its own 20 ms.", "s",
			quantiles(`weir_decision_duration_seconds_bucket{D}`)...),
		graph("Connections to Redis", "Idle, or used by calls under way; waiting: calls for which none was free. They share the next, so that a few are no trouble.", "short",
			query{`sum by (state) (weir_store_connections{R})`, "{{state}}"},
			query{`sum(weir_store_waiting_calls{R})`, "waiting calls"}),
		graph("Latency of Redis", "Calls of the store, those that failed included.", "s", quantiles(`weir_store_duration_seconds_bucket{R}`)...),
		graph("Latency of decisions by domain, p99", "1 in 100 takes longer.", "s",
			query{`histogram_quantile(0.99, sum by (domain, le) (rate(weir_decision_duration_seconds_bucket{D}[$__rate_interval])))`, "{{domain}}"}),
		graph("Latency of Redis by call, p99", "1 in 100 takes longer.", "s",
			query{`histogram_quantile(0.99, sum by (op, le) (rate(weir_store_duration_seconds_bucket{R}[$__rate_interval])))`, "{{op}}"}),
	}},
	{"Redis: errors and breakers", []panel{
		graph("Errors of Redis", "Calls that failed, by reason: store_unavailable no connection, store_timeout no answer in time, store_error an error as answer, breaker_open not asked after some of those. Empty if there are none.", "cps",
			query{`sum by (op, reason) (rate(weir_store_errors_total{R}[$__rate_interval])) > 0`, "{{op}} {{reason}}"}),
		{
			"state-timeline", "Breakers", "Domains about which a replica does not ask Redis, since it did not answer. One domain alone: its node of the cluster.", "none", 8, 8,
			[]state{{0, "green", "closed"}, {1, "red", "OPEN"}},
			[]query{{`max by (domain) (weir_store_breaker_open{D})`, "{{domain}}"}},
		},
		graph("Not followed", "Admitted requests that local shares did not follow, since there are too many subjects: if Redis goes, those begin with a whole share.", "cps",
			query{`sum(rate(weir_unfollowed_total{R}[$__rate_interval]))`, "not followed"}),
	}},
	{"Policies", []panel{
		graph("Versions in force", "Replicas by version: two for longer than a reload takes is WeirPolicyVersionsDiffer.", "short",
			query{`count by (version) (weir_policy_info{R})`, "{{version}}"}),
		graph("Age", "How long ago the policies in force were loaded.", "s",
			query{`time() - (weir_policy_load_timestamp_seconds{R} > 0)`, "{{instance}}"}),
		graph("Wrong files, and loads", "Files that are not in force as they are, and what was read that had changed, by result.", "short",
			query{`max(weir_policy_wrong_files{R})`, "wrong files"},
			query{`sum by (result) (increase(weir_policy_loads_total{R}[$__rate_interval]))`, "loads: {{result}}"}),
	}},
	{"Usage", []panel{
		graph("Settlements by result", "late: what was reserved stays charged. See WeirSettlementsLate.", "cps",
			query{`sum by (domain, limit, result) (rate(weir_usage_total{D}[$__rate_interval]))`, "{{domain}} {{limit}}: {{result}}"}),
		graph("Hits reserved", "By an estimate, before the work.", "cps",
			query{`sum by (domain, limit) (rate(weir_reserved_hits_total{D}[$__rate_interval]))`, "{{domain}} {{limit}}"}),
		graph("Hits settled", "What settlements changed: refunded of what was reserved, or charged beyond it.", "cps",
			query{`sum by (domain, limit, direction) (rate(weir_settled_hits_total{D}[$__rate_interval]))`, "{{domain}} {{limit}} {{direction}}"}),
	}},
	{"gRPC and access", []panel{
		graph("gRPC by method and code", "INVALID_ARGUMENT is a request that weir cannot read: Envoy lets it pass.", "reqps",
			query{`sum by (grpc_method, grpc_code) (rate(grpc_server_handled_total{R}[$__rate_interval]))`, "{{grpc_method}} {{grpc_code}}"}),
		graph("gRPC calls under way", "Started and not ended; streams of Envoy's access log and health watches are among them.", "short",
			query{`sum by (grpc_method) (grpc_server_started_total{R}) - sum by (grpc_method) (grpc_server_handled_total{R})`, "{{grpc_method}}"}),
		graph("Turned away", "Callers whose certificate may not do this, and connections that ended before TLS was agreed on. An Envoy among them lets everything pass.", "cps",
			query{`sum by (area) (rate(weir_denied_total{R}[$__rate_interval]))`, "denied: {{area}}"},
			query{`sum by (port) (rate(weir_tls_handshake_errors_total{R}[$__rate_interval]))`, "handshakes: {{port}}"}),
		graph("Certificates end in", "Until the first certificate, or the last of the clients' authorities, ends. Empty without TLS.", "s",
			query{`min by (file) (weir_tls_certificate_not_after_timestamp_seconds{R}) - time()`, "{{file}}"}),
		graph("Files of TLS", "wrong: replicas for which one is not in force as it is. Empty without TLS.", "short",
			query{`sum by (file) (weir_tls_file_wrong{R})`, "{{file}} wrong"},
			query{`sum by (file, result) (increase(weir_tls_loads_total{R}[$__rate_interval]))`, "{{file}}: {{result}}"}),
	}},
	{"Process", []panel{
		graph("CPU", "Cores that are used.", "short", query{`rate(process_cpu_seconds_total{R}[$__rate_interval])`, "{{instance}}"}),
		graph("Memory", "Resident, and Go's heap in use.", "bytes",
			query{`process_resident_memory_bytes{R}`, "{{instance}} resident"}, query{`go_memstats_heap_inuse_bytes{R}`, "{{instance}} heap"}),
		graph("Goroutines and files", "What grows without end is a leak.", "short",
			query{`go_goroutines{R}`, "{{instance}} goroutines"}, query{`process_open_fds{R}`, "{{instance}} files"}),
		graph("Longest pause for garbage", "Of the collections that Go remembers. (OpenMetrics writes the quantile as 1.0.)", "s", query{`go_gc_duration_seconds{R, quantile=~"1|1.0"}`, "{{instance}}"}),
		graph("Versions of weir", "Replicas by version of weir and of Go.", "short",
			query{`count by (version, go) (weir_build_info{R})`, "{{version}} {{go}}"}),
		graph("Running since", "A step back to 0 is a restart.", "s", query{`time() - process_start_time_seconds{R}`, "{{instance}}"}),
	}},
}

// graph is a third of a row.
func graph(title, about, unit string, queries ...query) panel {
	return panel{kind: "timeseries", title: title, about: about, unit: unit, width: 8, height: 8, queries: queries}
}

// quantiles are p50, p95 and p99 of a classic histogram.
func quantiles(buckets string) []query {
	var all []query
	for _, q := range []struct{ q, name string }{{"0.5", "p50"}, {"0.95", "p95"}, {"0.99", "p99"}} {
		all = append(all, query{"histogram_quantile(" + q.q + ", sum by (le) (rate(" + buckets + "[$__rate_interval])))", q.name})
	}
	return all
}
