package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"
)

// soon is how long what needs no waiting may take on a slow machine.
const soon = 10 * time.Second

// burst: as many requests as the bucket holds, and then one for each token that comes back.
func (d *demo) burst(ctx context.Context) error {
	began := time.Now()
	passed := 0
	a := d.ask(ctx, "Alice", 0)
	for ; a.passed() && passed < 10*d.tokens; a = d.ask(ctx, "Alice", 0) {
		passed++
	}
	took := a.at.Sub(began)
	if most := d.tokens + int(took/d.refill); passed < d.tokens || passed > most {
		return fmt.Errorf("%d of Alice's requests passed in %v, want %d..%d", passed, round(took), d.tokens, most)
	}
	say("%d of Alice's requests passed in %v.", passed, round(took))
	if err := a.refused("The next one", http.StatusTooManyRequests); err != nil {
		return err
	}

	// Who asks all the time gets no more than who waits.
	began, passed = a.at, 0
	refused := 0
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for a.at.Sub(began) < 5*d.refill {
		<-tick.C
		switch a = d.ask(ctx, "Alice", 0); {
		case a.passed():
			passed++
		case a.is(http.StatusTooManyRequests):
			refused++
		default:
			return a.unexpected("Alice")
		}
	}
	took = a.at.Sub(began)
	if tokens := int(took / d.refill); passed < tokens-1 || passed > tokens+1 {
		return fmt.Errorf("%d of Alice's requests passed in %v, want one each %v", passed, round(took), d.refill)
	}
	say("She does not wait, and asks all the time: in %v %d passed, and %d were refused, which cost her nothing.", round(took), passed, refused)

	for a.passed() {
		a = d.ask(ctx, "Alice", 0)
	}
	if !a.is(http.StatusTooManyRequests) {
		return a.unexpected("Alice")
	}
	if err := pause(ctx, a.retryAfter); err != nil {
		return err
	}
	if b := d.ask(ctx, "Alice", 0); !b.passed() {
		return b.unexpected(fmt.Sprintf("Alice, who waited %v as she was told,", a.retryAfter))
	}
	say("She waits %v, as she is told: the next one passes.", a.retryAfter)
	return nil
}

// laneFull: an account has its slots and no more, and the others have theirs.
func (d *demo) laneFull(ctx context.Context) error {
	bob, err := d.start(ctx, "Bob", d.lane)
	if err != nil {
		return err
	}
	say("%d of Bob's jobs run.", d.lane)
	if err := d.ask(ctx, "Bob", 0).refused("One more", http.StatusTooManyRequests); err != nil {
		return err
	}
	if a := d.ask(ctx, "Carol", 0); !a.passed() {
		return a.unexpected("Carol, whose lane is empty,")
	}
	say("Carol's passes.")
	if err := d.nextPasses(ctx, bob, "Bob"); err != nil {
		return err
	}
	return errors.Join(d.finish(ctx, bob, d.lane-1, limited), d.kept(ctx))
}

// poolFull: the lanes are free, and the service is full.
func (d *demo) poolFull(ctx context.Context) error {
	dave, err := d.start(ctx, "Dave", d.lane)
	if err != nil {
		return err
	}
	erin, err := d.start(ctx, "Erin", d.lane)
	if err != nil {
		return err
	}
	say("%d of Dave's jobs run, and %d of Erin's.", d.lane, d.lane)
	if err := d.ask(ctx, "Frank", 0).refused("Frank's first", http.StatusServiceUnavailable); err != nil {
		return err
	}
	if err := d.nextPasses(ctx, dave, "Frank"); err != nil {
		return err
	}
	return errors.Join(d.finish(ctx, dave, d.lane-1, limited), d.finish(ctx, erin, d.lane, limited), d.kept(ctx))
}

// serviceCrashes: Envoy sees the streams end, and weir has their slots back.
func (d *demo) serviceCrashes(ctx context.Context) error {
	grace, err := d.start(ctx, "Grace", d.lane)
	if err != nil {
		return err
	}
	say("%d of Grace's jobs run, and the service is killed.", d.lane)
	if _, err := docker(ctx, "compose", "kill", "imageservice"); err != nil {
		return err
	}
	for range d.lane {
		if a := <-grace.answers; !a.is(http.StatusServiceUnavailable) {
			return a.unexpected("Grace, whose job died,")
		}
	}
	say("Her clients get 503.")

	// Who has a slot gets as far as to the dead service.
	ended := time.Now()
	err = until(ctx, d.lease, func(ctx context.Context) error {
		asked := time.Now()
		a := d.ask(ctx, "Grace", 0)
		if !a.is(http.StatusServiceUnavailable) || a.retryAfter != 0 {
			return a.unexpected("Grace, whose slots should be free,")
		}
		say("Her slots are free: weir lets the next one pass that comes, %v later.", round(asked.Sub(ended)))
		return nil
	})
	if err != nil {
		return err
	}
	if _, err := docker(ctx, "compose", "start", "imageservice"); err != nil {
		return err
	}
	if err := d.open(ctx); err != nil {
		return err
	}
	return d.again(ctx, "Grace", "The service is back")
}

// envoyCrashes: nobody is left to tell that the streams have ended, so the leases do.
func (d *demo) envoyCrashes(ctx context.Context) error {
	henry, err := d.start(ctx, "Henry", d.lane)
	if err != nil {
		return err
	}
	say("%d of Henry's jobs run, and Envoy is killed.", d.lane)
	if _, err := docker(ctx, "compose", "kill", "envoy"); err != nil {
		return err
	}
	killed := time.Now()
	for range d.lane {
		if a := <-henry.answers; a.err == nil {
			return a.unexpected("Henry, whose Envoy died,")
		}
	}
	if _, err := docker(ctx, "compose", "start", "envoy"); err != nil {
		return err
	}
	if err := d.open(ctx); err != nil {
		return err
	}
	refused := 0
	err = until(ctx, d.lease+soon, func(ctx context.Context) error {
		a := d.ask(ctx, "Henry", 0)
		if a.passed() {
			return nil
		}
		refused++
		return a.unexpected("Henry, whose leases should be over,")
	})
	if err != nil {
		return err
	}
	say("It is started again, and refuses him %d times, since weir cannot know: his leases are over %v after the crash.", refused, round(time.Since(killed)))
	return d.again(ctx, "Henry", "His slots are free")
}

// replicaCrashes: the state is in Redis, so another replica goes on with it.
func (d *demo) replicaCrashes(ctx context.Context) error {
	ids, err := replicas(ctx)
	if err != nil {
		return err
	}
	if len(ids) < 2 {
		return fmt.Errorf("%d replica of weir runs, want 2", len(ids))
	}
	ivan, err := d.start(ctx, "Ivan", d.lane)
	if err != nil {
		return err
	}
	say("%d of Ivan's jobs run, and one of the %d replicas of weir is killed.", d.lane, len(ids))
	dead := ids[len(ids)-1]
	if _, err := docker(ctx, "kill", dead); err != nil {
		return err
	}

	// Until Envoy has noticed, it lets pass what it cannot ask about.
	unasked, refused := 0, 0
	began := time.Now()
	err = until(ctx, patience, func(ctx context.Context) error {
		switch a := d.ask(ctx, "Ivan", 0); {
		case a.is(http.StatusTooManyRequests):
			refused++
		case a.is(http.StatusOK) && !a.limited:
			unasked, refused = unasked+1, 0
		default:
			return a.unexpected("Ivan, whose lane is full,")
		}
		if refused < 20 || time.Since(began) < d.lease {
			return fmt.Errorf("%d refusals in a row from the other replica", refused)
		}
		return nil
	})
	if err != nil {
		return err
	}
	say("The other one refuses him. Envoy let pass what it could not ask about before it knew: %d of his requests.", unasked)
	if err := d.finish(ctx, ivan, d.lane, limited); err != nil {
		return err
	}
	if err := d.again(ctx, "Ivan", "His jobs end as if nothing had been"); err != nil {
		return err
	}
	if _, err := docker(ctx, "start", dead); err != nil {
		return err
	}
	return d.open(ctx)
}

// redisAway: nothing is limited, everything is counted, and then all is as before.
func (d *demo) redisAway(ctx context.Context) error {
	const bypassed = "sum(weir_bypassed_total)"
	if err := d.measures(ctx, "sum(weir_store_up)", 2); err != nil {
		return err
	}
	before, err := d.metric(ctx, bypassed)
	if err != nil {
		return err
	}
	if _, err := docker(ctx, "compose", "stop", "redis"); err != nil {
		return err
	}
	n := d.lane + 2
	judy, err := d.start(ctx, "Judy", n)
	if err != nil {
		return err
	}
	say("Redis is stopped. %d of Judy's jobs run: nothing keeps her to %d.", n, d.lane)
	if err := d.finish(ctx, judy, n, unlimited); err != nil {
		return err
	}
	if err := d.measures(ctx, bypassed, before+float64(n)); err != nil {
		return err
	}
	say("Prometheus knows: weir_bypassed_total counts each limit that was skipped.")

	if _, err := docker(ctx, "compose", "start", "redis"); err != nil {
		return err
	}
	started := time.Now()
	if err := d.measures(ctx, "sum(weir_store_up)", 2); err != nil {
		return err
	}
	say("Redis is started. %v later weir_store_up says so, and limits hold again.", round(time.Since(started)))
	if _, err := d.seen(ctx, http.MethodDelete); err != nil {
		return err
	}
	judy, err = d.start(ctx, "Judy", d.lane)
	if err != nil {
		return err
	}
	if err := d.ask(ctx, "Judy", 0).refused(fmt.Sprintf("%d of Judy's jobs run, and one more gets", d.lane), http.StatusTooManyRequests); err != nil {
		return err
	}
	return errors.Join(d.finish(ctx, judy, d.lane, limited), d.kept(ctx))
}

// nextPasses ends one of the running jobs, and waits for a slot for an account that had none.
func (d *demo) nextPasses(ctx context.Context, running jobs, account string) error {
	if err := d.finish(ctx, running, 1, limited); err != nil {
		return err
	}
	ended := time.Now()
	err := until(ctx, soon, func(ctx context.Context) error {
		if a := d.ask(ctx, account, 0); !a.passed() {
			return a.unexpected(account)
		}
		return nil
	})
	if err == nil {
		say("A job is done: %s's next passes, %v later.", account, round(time.Since(ended)))
	}
	return err
}

// again fills a lane that must be free, and empties it.
func (d *demo) again(ctx context.Context, account, why string) error {
	running, err := d.start(ctx, account, d.lane)
	if err != nil {
		return err
	}
	say("%s: %d jobs run again.", why, d.lane)
	return d.finish(ctx, running, d.lane, limited)
}

// kept asks the service whether it was ever asked to do more than it should.
func (d *demo) kept(ctx context.Context) error {
	c, err := d.seen(ctx, http.MethodGet)
	if err != nil {
		return err
	}
	if c.MostOfOneAccount > d.lane || c.MostInFlight > d.pool {
		return fmt.Errorf("the service had %d jobs of one account at once, and %d of all; want %d and %d at most",
			c.MostOfOneAccount, c.MostInFlight, d.lane, d.pool)
	}
	say("The service itself has seen at most %d jobs of one account at once, and %d of all.", c.MostOfOneAccount, c.MostInFlight)
	return nil
}
