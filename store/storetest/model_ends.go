package storetest

// Ends reports whether something that is known for a time is forgotten after from ms, and at to
// or before: time that is set back from to to from would bring it back to life, where it was
// not cleaned away.
func (m *Model) Ends(from, to int64) bool {
	ends := func(at int64) bool { return from < at && at <= to }
	for _, l := range m.leases {
		if ends(l.until()) || !l.released && ends(l.expiry) {
			return true
		}
		for _, s := range l.slots {
			if !l.released && ends(s.expiry) {
				return true
			}
		}
	}
	for _, b := range m.buckets { // a full one may have been none when its limit changed
		if ends(b.at) && b.tokens.Cmp(integer(b.limit.Capacity)) == 0 {
			return true
		}
	}
	for _, w := range m.windows { // an empty one may have been none when it was reset
		empty := true
		for _, hits := range w.hits {
			empty = empty && hits == 0
		}
		if empty && w.latest > from {
			return true
		}
	}
	for _, s := range m.streams {
		if ends(s.until) {
			return true
		}
	}
	for _, at := range m.told {
		if ends(at + 600_000) {
			return true
		}
	}
	for _, o := range m.asked {
		if o.ended && ends(o.endedAt+60_000) {
			return true
		}
	}
	return false
}
