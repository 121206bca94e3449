// Package page is the status page: one look at a replica, for somebody who was just
// woken up.
package page

import (
	"context"
	"embed"
	"encoding/json"
	"errors"
	"io/fs"
	"net/http"
	"slices"
	"sync"
	"time"
)

//go:embed assets
var embedded embed.FS

const (
	// MaxViewers is how many may watch at once.
	MaxViewers = 64
	every      = time.Second           // a snapshot
	fresh      = time.Second / 2       // how old a snapshot may be that is not watched
	settle     = 50 * time.Millisecond // from a Wake to its snapshot: often more has changed
	patience   = 5 * time.Second       // for a viewer who does not read
)

// Page serves the page. Use [New].
type Page struct {
	take    func() *Snapshot
	end     context.Context //nolint:containedctx // all streams end with it
	wake    chan struct{}
	running sync.WaitGroup // the collector

	taking sync.Mutex // held while a snapshot is taken: there is never more than one
	last   []byte     // what was taken last, guarded by taking
	lastAt time.Time

	mu      sync.Mutex
	viewers map[chan []byte]bool
	stop    context.CancelFunc // of the collector; nil: it does not run
}

// New returns a page of what take tells, which is called while somebody looks, at most
// twice a second where nothing wakes it, and never at once with itself. Streams end with
// end.
func New(end context.Context, take func() *Snapshot) *Page {
	return &Page{take: take, end: end, wake: make(chan struct{}, 1), viewers: make(map[chan []byte]bool)}
}

// Wake has viewers see at once that something has changed.
func (p *Page) Wake() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// Close waits until nothing of the page runs any more. Its context must have ended.
func (p *Page) Close() {
	p.mu.Lock()   // whoever enters from now on sees the end
	p.mu.Unlock() //nolint:staticcheck // nothing else is to be done under it
	p.running.Wait()
}

// Register adds the page's handlers, each guarded.
func (p *Page) Register(mux *http.ServeMux, guard func(http.Handler) http.Handler) {
	assets, err := fs.Sub(embedded, "assets")
	if err != nil {
		panic(err) // the folder is embedded above
	}
	files := http.FileServerFS(assets)
	handle := func(pattern string, h http.Handler) { mux.Handle(pattern, secure(guard(h))) }
	handle("GET /{$}", files)
	handle("GET /assets/{file}", http.StripPrefix("/assets/", files))
	handle("GET /status.json", http.HandlerFunc(p.once))
	handle("GET /status/events", http.HandlerFunc(p.events))
}

// secure lets a browser do with the page what it needs and nothing else.
func secure(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		header := w.Header()
		header.Set("Content-Security-Policy", "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
		header.Set("X-Content-Type-Options", "nosniff")
		header.Set("Referrer-Policy", "no-referrer")
		header.Set("Cache-Control", "no-cache")
		h.ServeHTTP(w, r)
	})
}

// snapshot returns one as JSON that is not older than age. Others have the same: it must not be
// changed, nor appended to.
func (p *Page) snapshot(age time.Duration) []byte {
	p.taking.Lock()
	defer p.taking.Unlock()
	if p.last == nil || time.Since(p.lastAt) > age {
		text, err := json.Marshal(p.take())
		if err != nil {
			panic(err) // a bug: a number that is none
		}
		p.last, p.lastAt = text, time.Now()
	}
	return p.last
}

func (p *Page) once(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(slices.Concat(p.snapshot(fresh), []byte{'\n'})) // the client has gone
}

// events sends each snapshot until the viewer leaves or the server stops.
func (p *Page) events(w http.ResponseWriter, r *http.Request) {
	mine := p.enter()
	if mine == nil {
		w.Header().Set("Retry-After", "10")
		http.Error(w, "too many watch this page; /status.json tells the same once", http.StatusServiceUnavailable)
		return
	}
	defer p.leave(mine)
	c := http.NewResponseController(w)
	// What bounds other requests would end this one. A recorder has no deadlines.
	if err := c.SetReadDeadline(time.Time{}); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no") // a proxy must not keep it
	send := func(text []byte) error {
		if err := c.SetWriteDeadline(time.Now().Add(patience)); err != nil && !errors.Is(err, http.ErrNotSupported) {
			return err
		}
		if _, err := w.Write(text); err != nil {
			return err
		}
		return c.Flush()
	}
	if send([]byte("retry: 1000\n\n")) != nil {
		return
	}
	for {
		select {
		case <-p.end.Done():
			return
		case <-r.Context().Done():
			return
		case event := <-mine:
			if send(event) != nil {
				return
			}
		}
	}
}

// enter returns a viewer's channel, or nil if there are too many. The first starts the
// collector.
func (p *Page) enter() chan []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.viewers) >= MaxViewers || p.end.Err() != nil {
		return nil
	}
	mine := make(chan []byte, 1)
	p.viewers[mine] = true
	if p.stop == nil {
		var ctx context.Context
		ctx, p.stop = context.WithCancel(p.end)
		p.running.Go(func() { p.collect(ctx) })
	}
	return mine
}

// leave ends a viewer. The last ends the collector.
func (p *Page) leave(mine chan []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.viewers, mine)
	if len(p.viewers) == 0 && p.stop != nil {
		p.stop()
		p.stop = nil
	}
}

// collect tells all viewers of each snapshot.
func (p *Page) collect(ctx context.Context) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		text := p.snapshot(0)
		event := make([]byte, 0, len(text)+8)
		event = append(append(append(event, "data: "...), text...), "\n\n"...)
		p.tell(ctx, event)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-p.wake:
			select {
			case <-ctx.Done():
				return
			case <-time.After(settle):
			}
			select { // what was told meanwhile is in the next snapshot
			case <-p.wake:
			default:
			}
		}
	}
}

// tell gives an event to all viewers, in the place of one that has not been fetched. One
// who comes later gets the next.
func (p *Page) tell(ctx context.Context, event []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if ctx.Err() != nil {
		return // the viewers are another collector's
	}
	for viewer := range p.viewers {
		select {
		case <-viewer:
		default:
		}
		viewer <- event // it has room: nobody else writes
	}
}

// Viewers is how many watch now.
func (p *Page) Viewers() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.viewers)
}
