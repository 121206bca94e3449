package storetest

// Choices are what a fuzz test chooses by: bytes, from the first to the last, and
// then zeros.
type Choices []byte

// Next returns a number below n, which is at most 256.
func (c *Choices) Next(n int) int {
	if len(*c) == 0 {
		return 0
	}
	b := int((*c)[0])
	*c = (*c)[1:]
	return b % n
}
