package standby

// Kept is how many states and leases are kept.
func (s *Standby) Kept() int { return s.local.Len() }
