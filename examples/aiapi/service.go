package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"expvar"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"weir/client"
)

const (
	modelTimeout = 2 * time.Minute
	maxBody      = 1 << 20 // bytes
	maxTokens    = 1 << 20 // of one request
)

// tokensLimit is the name of the limit of tokens, in policy.yaml, of every plan.
const tokensLimit = "tokens"

// service is one replica of the API.
type service struct {
	limits *client.Client
	model  string // URL
	keys   string // path
}

// job is a request that may ask weir: its caller is known, and what it may cost.
type job struct {
	User      string `json:"user"` // the model is told who asks, and never the key
	Prompt    string `json:"prompt"`
	MaxTokens uint64 `json:"max_tokens"` // that the model may answer with

	key, plan string
}

// estimate is how many tokens the job may use: its prompt's, at four bytes each, and all
// that it may be answered with.
func (j job) estimate() uint64 { return uint64(len(j.Prompt)+3)/4 + j.MaxTokens }

func (s *service) routes() http.Handler {
	mux := http.NewServeMux()
	// A refused request is answered by the middleware, and never reaches complete.
	mux.Handle("POST /v1/complete", s.admit(s.limits.Middleware(ask)(http.HandlerFunc(s.complete))))
	mux.Handle("GET /debug/vars", expvar.Handler())
	return mux
}

// ask is what a job costs: one request, and the tokens that it may use.
func ask(r *http.Request) client.Request {
	j := jobOf(r.Context())
	tokens := client.Describe("plan", j.plan, "api_key_tokens", j.key)
	tokens.Hits = new(j.estimate())
	return client.Ask(client.Describe("plan", j.plan, "api_key", j.key), tokens)
}

// admit lets in who has a key, with a job that makes sense. Others cost nobody anything.
func (s *service) admit(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		key, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		owner, err := s.owner(key)
		if err != nil {
			http.Error(w, "no such key", http.StatusUnauthorized)
			return
		}
		var j job
		if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody)).Decode(&j); err != nil || j.MaxTokens < 1 || j.MaxTokens > maxTokens {
			http.Error(w, `want {"prompt": "…", "max_tokens": 100}`, http.StatusBadRequest)
			return
		}
		j.User, j.key, j.plan = owner.User, key, owner.Plan
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), jobKey{}, j)))
	})
}

// owner is who has an API key, and the plan, as they are now.
func (s *service) owner(key string) (owner struct{ User, Plan string }, err error) {
	text, err := os.ReadFile(s.keys)
	if err != nil {
		return owner, err
	}
	var all map[string]struct{ User, Plan string }
	if err := json.Unmarshal(text, &all); err != nil {
		return owner, err
	}
	owner, ok := all[key]
	if !ok {
		return owner, errors.New("no such key")
	}
	return owner, nil
}

// complete does an admitted job, and notes after each step what it has used. The
// middleware tells weir the last of these notes when complete returns or panics.
func (s *service) complete(w http.ResponseWriter, r *http.Request) {
	j := jobOf(r.Context())
	used := func(tokens uint64) { client.FromContext(r.Context()).Use(tokensLimit, tokens) }

	used(j.estimate()) // as long as the model does not say: it may have worked
	// Who leaves does not stop the model, and what it does then is paid for, too: it is
	// heard to its end.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), modelTimeout)
	defer cancel()
	answer, err := s.askModel(ctx, j)
	if err != nil {
		if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
			used(0) // it was not asked
		}
		http.Error(w, "the model does not answer", http.StatusBadGateway)
		return
	}
	defer func() { _ = answer.Body.Close() }()

	done := false
	lines := bufio.NewScanner(answer.Body)
	for lines.Scan() {
		var c chunk
		err := json.Unmarshal(lines.Bytes(), &c)
		if c.Used != nil {
			used(*c.Used)
		}
		if answer.StatusCode != http.StatusOK {
			break
		}
		if err != nil {
			panic(fmt.Errorf("aiapi: the model does not keep to its protocol: %w", err))
		}
		done = c.Done
		_, _ = io.WriteString(w, c.Text) // the caller may have left
		_ = http.NewResponseController(w).Flush()
	}
	switch {
	case answer.StatusCode != http.StatusOK:
		http.Error(w, "the model failed", http.StatusBadGateway)
	case !done:
		panic(http.ErrAbortHandler) // the caller must see that this is not the end
	}
}

func (s *service) askModel(ctx context.Context, j job) (*http.Response, error) {
	body, err := json.Marshal(j)
	if err != nil {
		return nil, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, s.model, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	return http.DefaultClient.Do(r)
}

type jobKey struct{}

// jobOf is the job that admit let in.
func jobOf(ctx context.Context) job {
	j, _ := ctx.Value(jobKey{}).(job)
	return j
}
