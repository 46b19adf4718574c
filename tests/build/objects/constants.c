// Arguments that are the same in each call: gcc leaves them out of the function.
extern int outside(int number);

static __attribute__((noinline)) int sums(unsigned long size, int step, unsigned char part,
					  long large, int number)
{
	int sum = outside(number);

	return sum + (int)size + step + part + (int)large;
}

int constants(int number)
{
	return sums(128, -128, 0xff, 0xfedcba98, number) + sums(128, -128, 0xff, 0xfedcba98, 3);
}
