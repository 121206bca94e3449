package main

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"
)

// chunk is one line of the model's answer.
type chunk struct {
	Text string  `json:"text,omitempty"`
	Used *uint64 `json:"used,omitempty"` // tokens, up to and with this line; nil: it does not say
	Done bool    `json:"done,omitempty"`
}

// fake is a model that knows what it was asked, and what it told to have used. The first
// word of a prompt is how it behaves: deny, fail, vanish, hold, break, nonsense, long,
// slow; anything else is answered with half of the tokens that it may have.
type fake struct {
	mu   sync.Mutex
	work []*completion
}

// completion is what became of one job.
type completion struct {
	job
	Used uint64 `json:"used"`
	Told bool   `json:"told"` // anything of what was used
}

func (f *fake) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /", f.complete)
	mux.HandleFunc("GET /", func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(f.all()) })
	return mux
}

// all is a copy of what became of all jobs.
func (f *fake) all() []completion {
	f.mu.Lock()
	defer f.mu.Unlock()
	all := make([]completion, len(f.work))
	for i, c := range f.work {
		all[i] = *c
	}
	return all
}

func (f *fake) complete(w http.ResponseWriter, r *http.Request) {
	c := new(completion)
	text, err := io.ReadAll(r.Body)
	if err == nil {
		err = json.Unmarshal(text, &c.job)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	f.mu.Lock()
	f.work = append(f.work, c)
	f.mu.Unlock()

	words := strings.Fields(c.Prompt)
	how, used := strings.Join(words[:min(1, len(words))], ""), uint64(len(words))
	last := used + max(1, c.MaxTokens/2)
	switch how {
	case "hold":
		<-r.Context().Done()
		return
	case "vanish":
		panic(http.ErrAbortHandler)
	case "deny":
		http.Error(w, "no", http.StatusForbidden)
		return
	case "fail":
		w.WriteHeader(http.StatusInternalServerError)
		f.tell(w, c, chunk{Used: new(used)})
		return
	case "long":
		last = used + 2*c.MaxTokens
	}
	for half, line := (used+last)/2, last/8+1; used < last; {
		step := min(line, last-used)
		used += step
		f.tell(w, c, chunk{Text: strings.Repeat("la ", int(step)), Used: new(used), Done: used == last})
		switch {
		case how == "slow": // and goes on when nobody hears it
			select {
			case <-time.After(20 * time.Millisecond):
			case <-r.Context().Done():
			}
		case how == "break" && used >= half:
			panic(http.ErrAbortHandler)
		case how == "nonsense" && used >= half:
			_, _ = io.WriteString(w, "la la la\n")
			return
		}
	}
}

// tell sends a line, and notes what it tells.
func (f *fake) tell(w http.ResponseWriter, c *completion, line chunk) {
	f.mu.Lock()
	c.Used, c.Told = *line.Used, true
	f.mu.Unlock()
	_ = json.NewEncoder(w).Encode(line)
	_ = http.NewResponseController(w).Flush()
}
