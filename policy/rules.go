package policy

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"weir/limit"
)

func (p *parser) tokenBucket(f *field, _ *node, at *path) (rule, bool) {
	fields := p.fields(f.value, at, bucketLevel)
	if f.value.Kind != yaml.MappingNode {
		return rule{}, false
	}
	r := p.named(fields, "token_bucket.", at)
	var capacity int64
	hasCapacity, hasRefill := false, false
	if c := p.require(fields, "capacity", "token_bucket.capacity", f.line, at, required["capacity"]); c != nil {
		capacity, hasCapacity = p.whole(c, at, 1, limit.MaxExact, required["capacity"])
	}
	if c := p.require(fields, "refill", "token_bucket.refill", f.line, at, required["refill"]); c != nil {
		r.count, r.period, hasRefill = p.refill(c, at)
	}
	if !hasCapacity || !hasRefill {
		return rule{}, false
	}
	b, err := limit.NewTokenBucket(capacity, r.count, r.period)
	if err != nil {
		p.fail(f.line, at, "token_bucket: "+err.Error())
		return rule{}, false
	}
	r.check.Limit = b
	return r, p.reserve(fields, &r, at)
}

// reserve reads how long what is reserved may be settled, if it is said.
func (p *parser) reserve(fields []field, r *rule, at *path) bool {
	f := get(fields, "reserve")
	if f == nil {
		return true
	}
	d, ok := p.duration(f, at, limit.MaxLease)
	if ok && (d < time.Millisecond || d > limit.MaxLease || d%time.Millisecond != 0) {
		p.fail(f.line, at, fmt.Sprintf("%s must be whole milliseconds, 1ms..%v, got %s; write it like 10m", f.label, limit.MaxLease, describe(f.value)))
		return false
	}
	r.check.Reserve = d
	return ok
}

// refill reads N/s, N/m, N/h, N/d, or N/30s with any time.
func (p *parser) refill(f *field, at *path) (count int64, period time.Duration, ok bool) {
	if isNull(f.value) {
		return 0, 0, false
	}
	number, per, slash := strings.Cut(f.value.Value, "/")
	valid := f.value.Kind == yaml.ScalarNode && slash && number != "" && strings.Trim(number, "0123456789") == ""
	switch per {
	case "s", "m", "h":
		per = "1" + per
	case "d":
		per = "24h"
	}
	period, err := time.ParseDuration(per)
	if !valid || err != nil {
		p.fail(f.value.Line, at, fmt.Sprintf("%s must be tokens per time, got %s; write it like 1/s, 60/m, 5/h, 100/d or 1/30s", f.label, describe(f.value)))
		return 0, 0, false
	}
	count, err = strconv.ParseInt(number, 10, 64)
	switch {
	case err != nil || count > limit.MaxExact:
		p.fail(f.value.Line, at, fmt.Sprintf("%s must have at most %d tokens, got %s; write fewer in a shorter time", f.label, int64(limit.MaxExact), show(number)))
	case count == 0:
		p.fail(f.value.Line, at, fmt.Sprintf("%s must be > 0, got %s; write how fast the bucket fills, like 1/s", f.label, describe(f.value)))
	case period < time.Millisecond || period%time.Millisecond != 0:
		p.fail(f.value.Line, at, fmt.Sprintf("%s must be in whole milliseconds, at least 1ms, got %s; write a longer time", f.label, describe(f.value)))
	default:
		return count, period, true
	}
	return 0, 0, false
}

func (p *parser) rateLimit(f *field, n *node, at *path) (rule, bool) {
	before := len(p.errors.list)
	fields := p.fields(f.value, at, windowLevel)
	if f.value.Kind != yaml.MappingNode {
		return rule{}, false
	}
	r := p.named(fields, "rate_limit.", at)
	unlimited := false
	if c := get(fields, "unlimited"); c != nil {
		var ok bool
		if unlimited, ok = p.flag(c, at); !ok {
			return rule{}, false
		}
	}
	unit := p.unit(fields, f.line, at, unlimited)
	var maximum int64
	switch c := get(fields, "requests_per_unit"); {
	case c != nil:
		maximum, _ = p.whole(c, at, 0, limit.MaxRequestsPerUnit, required["requests_per_unit"])
	case !unlimited:
		p.mistake(f.line, at, "rate_limit.requests_per_unit is missing, which means 0 and bans; write 0 to ban, or the number")
	}
	multiplier := int64(1)
	if c := get(fields, "unit_multiplier"); c != nil {
		multiplier, _ = p.whole(c, at, 1, limit.MaxExact, "write how many units a window has")
	}
	slides := false
	if c := get(fields, "window"); c != nil {
		slides = p.slides(c, at)
	}
	over := n.quota
	if c := get(fields, "on_over"); c != nil {
		over = p.onOver(c, at)
	}
	if unlimited {
		for _, name := range []string{"unit_multiplier", "window", "on_over", "reserve"} {
			if c := get(fields, name); c != nil {
				p.fail(c.line, at, c.label+" does not go with unlimited; remove one")
			}
		}
	}
	if len(p.errors.list) > before {
		return rule{}, false
	}
	if unlimited {
		return r, true
	}
	w, err := limit.NewWindow(maximum, unit, multiplier)
	if err != nil {
		p.fail(f.line, at, "rate_limit."+err.Error()+"; use a larger unit or a smaller number")
		return rule{}, false
	}
	if slides {
		if w, err = limit.NewSlidingWindow(maximum, unit, multiplier); err != nil {
			p.fail(f.line, at, "rate_limit."+err.Error()+"; use fewer units, or a fixed one")
			return rule{}, false
		}
	}
	w.ChargeOver = over
	r.check.Limit = w
	return r, p.reserve(fields, &r, at)
}

// unit reads the unit of a rate_limit; an unlimited one has none.
func (p *parser) unit(fields []field, line int, at *path, unlimited bool) limit.Unit {
	f := get(fields, "unit")
	if f == nil {
		if !unlimited {
			p.fail(line, at, "rate_limit.unit is missing; write "+units)
		}
		return limit.NoUnit
	}
	text, ok := p.text(f, at)
	if !ok {
		return limit.NoUnit
	}
	unit := limit.ParseUnit(strings.ToLower(text))
	switch {
	case unlimited && unit != limit.NoUnit:
		p.fail(f.line, at, "rate_limit.unit does not go with unlimited; remove one")
	case unlimited:
		p.mistake(f.line, at, fmt.Sprintf("rate_limit.unit %s is no unit; remove it", describe(f.value)))
	case unit == limit.NoUnit:
		p.fail(f.line, at, fmt.Sprintf("rate_limit.unit must be a unit, got %s; write %s", describe(f.value), units))
	}
	return unit
}

// slides reads fixed or sliding.
func (p *parser) slides(f *field, at *path) bool {
	text, ok := p.text(f, at)
	if ok && text != "fixed" && text != "sliding" {
		p.fail(f.line, at, fmt.Sprintf("%s must be fixed or sliding, got %s; write one of the two", f.label, describe(f.value)))
	}
	return text == "sliding"
}

func (p *parser) onOver(f *field, at *path) (charge bool) {
	text, ok := p.text(f, at)
	if ok && text != "charge" && text != "refuse" {
		p.fail(f.line, at, fmt.Sprintf("%s must be charge or refuse, got %s; write one of the two", f.label, describe(f.value)))
	}
	return text == "charge"
}

func (p *parser) concurrency(f *field, _ *node, at *path) (rule, bool) {
	fields := p.fields(f.value, at, concurrencyLevel)
	if f.value.Kind != yaml.MappingNode {
		return rule{}, false
	}
	r := p.named(fields, "concurrency.", at)
	var maximum int64
	var lease, retryAfter, linger, wait time.Duration
	waits := false
	hasMax, hasLease := false, false
	if c := p.require(fields, "max_in_flight", "concurrency.max_in_flight", f.line, at, required["max_in_flight"]); c != nil {
		maximum, hasMax = p.whole(c, at, 1, limit.MaxInFlight, required["max_in_flight"])
	}
	if c := p.require(fields, "lease", "concurrency.lease", f.line, at, required["lease"]); c != nil {
		lease, hasLease = p.duration(c, at, limit.MaxLease)
	}
	if c := get(fields, "retry_after"); c != nil {
		d, ok := p.duration(c, at, math.MaxInt64)
		if ok && (d < time.Second || d%time.Second != 0) {
			p.fail(c.line, at, fmt.Sprintf("%s must be whole seconds, at least 1s, got %s; write it like 10s", c.label, describe(c.value)))
			return rule{}, false
		}
		retryAfter = d
	}
	if c := get(fields, "linger"); c != nil {
		d, ok := p.duration(c, at, limit.MaxLease)
		if ok && (d < time.Millisecond || d > limit.MaxLease || d%time.Millisecond != 0) {
			p.fail(c.line, at, fmt.Sprintf("%s must be whole milliseconds, 1ms..%v, got %s; write it like 30s", c.label, limit.MaxLease, describe(c.value)))
			return rule{}, false
		}
		linger = d
	}
	if c := get(fields, "max_wait"); c != nil {
		d, ok := p.duration(c, at, limit.MaxWait)
		if ok && (d < 0 || d > limit.MaxWait) {
			p.fail(c.line, at, fmt.Sprintf("%s must be 0s..%v, got %s; write it like 5ms", c.label, limit.MaxWait, describe(c.value)))
			return rule{}, false
		}
		wait, waits = d, ok
	}
	if !hasMax || !hasLease {
		return rule{}, false
	}
	c, err := limit.NewConcurrency(maximum, lease)
	if err != nil {
		p.fail(f.line, at, "concurrency."+err.Error()+"; write it like 30s, 2m or 1h30m")
		return rule{}, false
	}
	c.RetryAfterMax, c.Linger = retryAfter, linger
	if waits {
		c.MaxWait = wait
		if wait == 0 {
			c.MaxWait = -1
		}
	}
	r.check.Limit = c
	return r, true
}

// named reads the keys that every limit has: name and replaces.
func (p *parser) named(fields []field, prefix string, at *path) rule {
	var r rule
	if f := get(fields, "name"); f != nil {
		r.explicit = p.name(f, at)
	}
	f := get(fields, "replaces")
	switch {
	case f == nil || isNull(f.value):
		return r
	case f.value.Kind != yaml.SequenceNode:
		p.fail(f.line, at, fmt.Sprintf("%s must be a list, got %s; write [{name: NAME}]", f.label, describe(f.value)))
		return r
	}
	for _, item := range f.value.Content {
		item = resolve(item)
		if item.Kind != yaml.MappingNode {
			p.fail(item.Line, at, fmt.Sprintf("an item of %s must be a map, got %s; write {name: NAME}", f.label, describe(item)))
			continue
		}
		c := get(p.fields(item, at, replaceLevel), "name")
		if c == nil {
			p.fail(item.Line, at, fmt.Sprintf("an item of %s has no name; write {name: NAME}", f.label))
			continue
		}
		c.label = prefix + "replaces.name"
		name := p.name(c, at)
		switch name {
		case "": // told already
		case r.explicit:
			p.fail(c.line, at, fmt.Sprintf("%s names itself, %s; name another limit or remove it", f.label, show(name)))
		default:
			r.replaces = append(r.replaces, name)
		}
	}
	return r
}

// name reads the name of a limit, or "" if it is not valid.
func (p *parser) name(f *field, at *path) string {
	name, ok := p.text(f, at)
	switch {
	case !ok:
	case name == "":
		p.fail(f.line, at, f.label+" is empty; write a name or remove it")
	case len(name) > MaxName:
		p.fail(f.line, at, fmt.Sprintf("%s is %d bytes long, and may have %d; shorten it", f.label, len(name), MaxName))
	case !printable(name):
		p.fail(f.line, at, fmt.Sprintf("%s %s has a character that can't be printed; remove it", f.label, show(name)))
	default:
		return name
	}
	return ""
}
