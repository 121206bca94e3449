package redis

import (
	"testing"
	"testing/synctest"
	"time"
)

// A lone call goes at once. While a batch is out those that come wait to go together, until they
// are enough, or the batch is back, or late.
func TestCallsGatherWhileABatchIsOut(t *testing.T) {
	for _, tt := range []struct {
		name  string
		first int // calls that wait
		then  func(p *pipes)
	}{
		{"enough", enough - 1, func(p *pipes) { queueOne(t, p) }},
		{"back", 1, func(p *pipes) { p.back() }},
		{"late", 1, func(*pipes) { time.Sleep(late) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := idlePipes()
				queueOne(t, p)
				if !mayTake(p) || len(p.take(nil)) != 1 {
					t.Fatal("a lone call waits")
				}
				for range tt.first {
					queueOne(t, p)
				}
				if mayTake(p) {
					t.Errorf("%d calls go while a batch is out", tt.first)
				}
				tt.then(p)
				synctest.Wait()
				if !mayTake(p) {
					t.Error("they still wait")
				}
				p.alarm.Stop()
			})
		})
	}
}

func queueOne(t *testing.T, p *pipes) {
	t.Helper()
	c := &call{script: current.decide, ctx: t.Context()}
	if err := p.queue(c); err != nil {
		t.Fatal(err)
	}
}

func mayTake(p *pipes) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.may()
}
