package client

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"time"
)

// What stands in for zero in QueueOptions.
const (
	defaultWorkers = 3
	defaultDepth   = 100
	defaultTotal   = 10_000
)

// QueueOptions configure a Queue. Its zero value fits three slots for each account.
type QueueOptions struct {
	// Workers is how many jobs of an account work at once; 0 means 3. More than the
	// account has slots is only more to refuse.
	Workers int
	// Depth is how many jobs of an account may wait; 0 means 100.
	Depth int
	// Total is how many jobs of all accounts may wait, and so how many accounts; 0
	// means 10,000.
	Total int
	// Retry is the patience of each job once it is its turn.
	Retry Retry
}

// Queue lets jobs wait for their turn, first come, first served in each account. An
// account has a fixed number of workers, and only the next job asks the service, so that
// jobs don't take each other's tokens. It has no goroutines of its own, and keeps nothing
// of an account without jobs; jobs are in memory only. It may be used by many goroutines.
// Use [Client.NewQueue].
type Queue struct {
	c        *Client
	options  QueueOptions
	patience *patience
	life     context.Context
	cut      context.CancelCauseFunc
	jobs     sync.WaitGroup

	mu       sync.Mutex
	closed   bool
	accounts map[string]*account
	waiting  int
}

// account is the jobs of one account: those that wait, work or end.
type account struct {
	turn    chan struct{} // has one if it is a job's turn to be next
	workers chan struct{} // has one for each worker that is taken
	jobs    int           // guarded by Queue.mu, as is waiting
	waiting int
}

// ErrQueueFull is the error of a job that finds no room in its Queue.
var ErrQueueFull = errors.New("client: the queue is full")

// NewQueue returns a queue that asks by this client. Close it before the client.
func (c *Client) NewQueue(o QueueOptions) *Queue {
	o.Workers = cmp.Or(max(0, o.Workers), defaultWorkers)
	o.Depth = cmp.Or(max(0, o.Depth), defaultDepth)
	o.Total = cmp.Or(max(0, o.Total), defaultTotal)
	q := &Queue{c: c, options: o, patience: newPatience(o.Retry, queueAttempts, queueBudget), accounts: make(map[string]*account)}
	q.life, q.cut = context.WithCancelCause(context.Background())
	return q
}

// Work is done with a lease, which is released when it returns or panics; ctx carries
// it, and ends with the job's.
type Work func(ctx context.Context, l *Lease) error

// Do waits for the account's turn and for the service to admit r, does the work, and
// returns its error. Errors before the work: [ErrQueueFull], at once; [ErrClosed]; those
// of [Client.Wait]; the cause of ctx.
func (q *Queue) Do(ctx context.Context, accountID string, r Request, work Work) error {
	a, err := q.enter(accountID)
	if err != nil {
		return err
	}
	defer q.jobs.Done()
	return q.job(ctx, accountID, a, r, work)
}

// Go is Do in a goroutine of its own, if there is room: else it returns [ErrQueueFull] or
// [ErrClosed]. Then done, unless it is nil, is called with what Do returns.
func (q *Queue) Go(ctx context.Context, accountID string, r Request, work Work, done func(error)) error {
	a, err := q.enter(accountID)
	if err != nil {
		return err
	}
	go func() {
		defer q.jobs.Done()
		err := q.job(ctx, accountID, a, r, work)
		if done != nil {
			done(err)
		}
	}()
	return nil
}

// Depth is how many jobs wait for their work to begin.
func (q *Queue) Depth() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.waiting
}

// Accounts is how many have jobs that wait or work.
func (q *Queue) Accounts() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.accounts)
}

// Close takes no more jobs and waits for those it has. When ctx ends, it ends theirs,
// with the cause [ErrClosed], waits for them all the same, and returns ctx's error.
func (q *Queue) Close(ctx context.Context) error {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	stop := context.AfterFunc(ctx, func() { q.cut(ErrClosed) })
	q.jobs.Wait()
	if !stop() {
		return ctx.Err()
	}
	q.cut(ErrClosed)
	return nil
}

// enter takes a place among those that wait.
func (q *Queue) enter(accountID string) (*account, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return nil, ErrClosed
	}
	a := q.accounts[accountID]
	if q.waiting >= q.options.Total || a != nil && a.waiting >= q.options.Depth {
		q.c.observer.Count(GaveUp, "queue_full")
		return nil, ErrQueueFull
	}
	if a == nil {
		a = &account{turn: make(chan struct{}, 1), workers: make(chan struct{}, q.options.Workers)}
		q.accounts[accountID] = a
	}
	a.jobs++
	a.waiting++
	q.waiting++
	q.c.observer.Level(QueueDepth, 1)
	q.jobs.Add(1)
	return a, nil
}

// begin ends the waiting of a job.
func (q *Queue) begin(a *account) {
	q.mu.Lock()
	defer q.mu.Unlock()
	a.waiting--
	q.waiting--
	q.c.observer.Level(QueueDepth, -1)
}

// leave ends a job. The last one's account is forgotten.
func (q *Queue) leave(accountID string, a *account) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if a.jobs--; a.jobs == 0 {
		delete(q.accounts, accountID)
	}
}

// job is one that has entered.
func (q *Queue) job(ctx context.Context, accountID string, a *account, r Request, work Work) error {
	defer q.leave(accountID, a)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(q.life, func() { cancel(context.Cause(q.life)) })()

	start := time.Now()
	l, err := q.admit(ctx, a, r)
	q.begin(a)
	if err != nil {
		return err
	}
	q.c.observer.Took(QueueWait, time.Since(start))
	q.c.observer.Level(QueueWorking, 1)
	defer func() {
		<-a.workers
		q.c.observer.Level(QueueWorking, -1)
	}()
	return q.c.hold(ctx, l, func(ctx context.Context) error { return work(ctx, l) })
}

// admit waits for the job's turn, a worker, and the service. Without an error the worker
// is taken.
func (q *Queue) admit(ctx context.Context, a *account, r Request) (*Lease, error) {
	if err := take(ctx, a.turn); err != nil {
		return nil, err
	}
	defer func() { <-a.turn }()
	if err := take(ctx, a.workers); err != nil {
		return nil, err
	}
	l, err := q.c.wait(ctx, r, q.patience)
	if err != nil {
		<-a.workers
		return nil, err
	}
	return l, nil
}

// take takes one of what c has places for, in order of those that wait.
func take(ctx context.Context, c chan<- struct{}) error {
	select {
	case c <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// hold does the work under the lease and ends it, also if the work panics.
func (c *Client) hold(ctx context.Context, l *Lease, work func(context.Context) error) (err error) {
	outcome := "panic"
	defer func() { _ = l.End(ctx, Ending{Outcome: outcome}) }() // the observer is told of errors
	err = work(NewContext(ctx, l))
	switch {
	case err == nil:
		outcome = "ok"
	case ctx.Err() != nil:
		outcome = "cancelled"
	default:
		outcome = "error"
	}
	return err
}
