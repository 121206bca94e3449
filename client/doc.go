// Package client asks weir, from a Go service, whether work may start, keeps what an
// admitted request holds, and gives it back.
//
// Five lines protect an HTTP handler:
//
//	limits := client.New(conn, client.Options{Domain: "inference", Logger: slog.Default()})
//	defer limits.Close()
//	http.Handle("/images", limits.Middleware(func(r *http.Request) client.Request {
//		return client.Ask(client.Describe("account", accountOf(r)), client.Describe("pool", "images"))
//	})(images))
//
// Other callers write
//
//	lease, err := limits.Acquire(ctx, request)
//	if err != nil {
//		return err // a *LimitedError if it was refused
//	}
//	defer lease.Release(ctx)
//
// and whoever may wait calls [Client.Wait], or puts the work in a [Queue].
//
// # What is asked again
//
// An answer that was lost is asked for again under the same operation id, which takes
// nothing twice. A refusal is an answer: only Wait and Queue ask again after it, when
// Retry-After is over and some jitter, and only if it says that this can help. Both are
// bounded by attempts, by the context's deadline and by a budget: a share of the
// requests.
//
// # When the service is away
//
// As everywhere in weir, the work goes on ([FailOpen]), unless [Options].FailureMode says
// otherwise; each such answer is told to the [Observer] and by [Lease.Bypass]. A release
// that the service does not hear of is sent again until the lease has expired.
//
// It is away for a caller whom it has not answered within Timeout, and for all when three
// calls in a row were not answered: then nobody waits, and one call a second tries it. A
// caller whose context ends before Timeout gets the context's error, and says nothing about
// the service: in its place the client looks by gRPC's health check (which weir answers to
// everybody), so that later callers are not kept, however short their time.
//
// If every answer to an Acquire is lost, or its caller leaves, nobody knows whether there is
// a lease. The client asks for it, to release it, as long as it surely lives: the shortest
// life of a lease that it was told of, at most a minute; 5 s if it was told of none. That
// costs the price of the request if there was no lease, and once more if the policy has
// leases that are shorter than those. Who names the operation asks for it himself, or its
// slots are taken until the lease expires.
package client
