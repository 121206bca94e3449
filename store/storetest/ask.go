package storetest

import (
	"fmt"
	"strconv"
	"strings"

	"weir/limit"
	"weir/policy"
)

// ask is a line of take.
type ask struct {
	request policy.Request
	times   int
	name    string // of its lease
	stream  string
	lease   string // a name

	operation limit.Operation
}

func parseAsk(domain, line string) (ask, error) {
	a := ask{request: policy.Request{Domain: domain}, times: 1}
	descriptors, options, _ := strings.Cut(line, "|")
	for _, word := range strings.Fields(options) {
		key, value, _ := strings.Cut(word, "=")
		switch key {
		case "as":
			a.name = value
		case "stream":
			a.stream = value
		case "lease":
			a.lease = value
		case "op":
			a.operation.ID = value
		case "attempt":
			n, err := strconv.ParseUint(value, 10, 32)
			if err != nil {
				return ask{}, err
			}
			a.operation.Attempt = uint32(n)
		case "hits":
			n, err := strconv.ParseUint(value, 10, 64)
			if err != nil {
				return ask{}, err
			}
			a.request.Hits = n
		default:
			return ask{}, fmt.Errorf("unknown option %q", word)
		}
	}
	for _, word := range strings.Fields(descriptors) {
		if n, ok := strings.CutSuffix(word, "x"); ok && !strings.Contains(word, "=") {
			times, err := strconv.Atoi(n)
			if err != nil {
				return ask{}, err
			}
			a.times = times
			continue
		}
		d, err := parseDescriptor(word)
		if err != nil {
			return ask{}, err
		}
		a.request.Descriptors = append(a.request.Descriptors, d)
	}
	return a, nil
}

func parseDescriptor(word string) (policy.Descriptor, error) {
	var d policy.Descriptor
	entries, options, _ := strings.Cut(word, ";")
	for _, entry := range strings.Split(entries, ",") {
		key, value, _ := strings.Cut(entry, "=")
		d.Entries = append(d.Entries, limit.Entry{Key: key, Value: value})
	}
	if options == "" {
		return d, nil
	}
	for _, option := range strings.Split(options, ";") {
		key, value, _ := strings.Cut(option, "=")
		var err error
		switch key {
		case "hits":
			d.HasHits = true
			d.Hits, err = strconv.ParseUint(value, 10, 64)
		case "neg":
			d.Negative = true
		case "limit":
			d.Override, err = parseOverride(value)
		default:
			err = fmt.Errorf("unknown option %q", option)
		}
		if err != nil {
			return policy.Descriptor{}, err
		}
	}
	return d, nil
}

func parseOverride(text string) (*limit.Window, error) {
	count, unit, _ := strings.Cut(text, "/")
	n, err := strconv.ParseInt(count, 10, 64)
	if err != nil {
		return nil, err
	}
	w, err := limit.NewWindow(n, limit.ParseUnit(unit), 1)
	return &w, err
}
