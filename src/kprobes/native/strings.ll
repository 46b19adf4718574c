; Generated from strings.c by `make runtime`.
; 8c249863e17042d5db887b4540f9a4091ea0b0c1d6e22afb777ed78e133c837d
define dso_local i64 @strings_cut(ptr %cut) #0 {
entry:
  br label %for.cond
for.cond:
  %row.0 = phi i64 [ 0, %entry ], [ %inc48, %for.end37 ]
  %at.0 = phi i64 [ 0, %entry ], [ %add46, %for.end37 ]
  %count = getelementptr inbounds nuw i8, ptr %cut, i64 32
  %0 = load i64, ptr %count, align 8
  %cmp = icmp ult i64 %row.0, %0
  br i1 %cmp, label %for.body, label %for.end49
for.body:
  %1 = load ptr, ptr %cut, align 8
  %begins = getelementptr inbounds nuw i8, ptr %cut, i64 16
  %2 = load ptr, ptr %begins, align 8
  %arrayidx = getelementptr inbounds i64, ptr %2, i64 %row.0
  %3 = load i64, ptr %arrayidx, align 8
  %add.ptr = getelementptr inbounds i8, ptr %1, i64 %3
  %lengths = getelementptr inbounds nuw i8, ptr %cut, i64 24
  %4 = load ptr, ptr %lengths, align 8
  %arrayidx1 = getelementptr inbounds i32, ptr %4, i64 %row.0
  %5 = load i32, ptr %arrayidx1, align 4
  %conv = sext i32 %5 to i64
  %blob = getelementptr inbounds nuw i8, ptr %cut, i64 48
  %6 = load ptr, ptr %blob, align 8
  %add.ptr2 = getelementptr inbounds nuw i8, ptr %6, i64 %at.0
  %starts = getelementptr inbounds nuw i8, ptr %cut, i64 56
  %7 = load ptr, ptr %starts, align 8
  %arrayidx3 = getelementptr inbounds i64, ptr %7, i64 %row.0
  store i64 %at.0, ptr %arrayidx3, align 8
  %8 = load ptr, ptr %cut, align 8
  %size = getelementptr inbounds nuw i8, ptr %cut, i64 8
  %9 = load i64, ptr %size, align 8
  %add.ptr5 = getelementptr inbounds i8, ptr %8, i64 %9
  %sub.ptr.lhs.cast = ptrtoint ptr %add.ptr5 to i64
  %sub.ptr.rhs.cast = ptrtoint ptr %add.ptr to i64
  br label %for.cond6
for.cond6:
  %done.0 = phi i64 [ 0, %for.body ], [ %add23, %for.inc ]
  %length.0 = phi i64 [ %conv, %for.body ], [ %length.1, %for.inc ]
  %cmp7 = icmp slt i64 %done.0, %length.0
  %10 = add i64 %done.0, %sub.ptr.rhs.cast
  %sub = sub i64 %sub.ptr.lhs.cast, %10
  %cmp9 = icmp sgt i64 %sub, 7
  %11 = select i1 %cmp7, i1 %cmp9, i1 false
  br i1 %11, label %for.body11, label %for.cond24
for.body11:
  %add.ptr12 = getelementptr inbounds nuw i8, ptr %add.ptr, i64 %done.0
  %12 = load i64, ptr %add.ptr12, align 1
  %is_raw = getelementptr inbounds nuw i8, ptr %cut, i64 40
  %13 = load i64, ptr %is_raw, align 8
  %tobool.not = icmp eq i64 %13, 0
  %sub.i = add i64 %12, -72340172838076673
  %not.i = xor i64 %12, -1
  %and.i = and i64 %sub.i, %not.i
  %and1.i = and i64 %and.i, -9187201950435737472
  %cond = select i1 %tobool.not, i64 %and1.i, i64 0
  %add.ptr13 = getelementptr inbounds nuw i8, ptr %add.ptr2, i64 %done.0
  store i64 %12, ptr %add.ptr13, align 1
  %tobool15.not = icmp eq i64 %cond, 0
  br i1 %tobool15.not, label %for.inc, label %if.then
if.then:
  %14 = call range(i64 7, 65) i64 @llvm.cttz.i64(i64 %cond, i1 true)
  %cast = trunc nuw nsw i64 %14 to i32
  %div44 = lshr i32 %cast, 3
  %conv16 = zext nneg i32 %div44 to i64
  %add = or disjoint i64 %done.0, %conv16
  %cmp17 = icmp slt i64 %add, %length.0
  %add.length.0 = select i1 %cmp17, i64 %add, i64 %length.0
  br label %for.inc
for.inc:
  %length.1 = phi i64 [ %add.length.0, %if.then ], [ %length.0, %for.body11 ]
  %add23 = add nuw nsw i64 %done.0, 8
  br label %for.cond6
for.cond24:
  %done.1 = phi i64 [ %inc, %if.end33 ], [ %done.0, %for.cond6 ]
  %cmp25 = icmp slt i64 %done.1, %length.0
  br i1 %cmp25, label %for.body27, label %for.end37
for.body27:
  %is_raw28 = getelementptr inbounds nuw i8, ptr %cut, i64 40
  %15 = load i64, ptr %is_raw28, align 8
  %tobool29.not = icmp eq i64 %15, 0
  br i1 %tobool29.not, label %land.lhs.true, label %if.end33
land.lhs.true:
  %arrayidx30 = getelementptr inbounds nuw i8, ptr %add.ptr, i64 %done.1
  %16 = load i8, ptr %arrayidx30, align 1
  %tobool31.not = icmp eq i8 %16, 0
  br i1 %tobool31.not, label %for.end37, label %if.end33
if.end33:
  %arrayidx34 = getelementptr inbounds nuw i8, ptr %add.ptr, i64 %done.1
  %17 = load i8, ptr %arrayidx34, align 1
  %arrayidx35 = getelementptr inbounds nuw i8, ptr %add.ptr2, i64 %done.1
  store i8 %17, ptr %arrayidx35, align 1
  %inc = add nuw nsw i64 %done.1, 1
  br label %for.cond24
for.end37:
  %length.2 = phi i64 [ %length.0, %for.cond24 ], [ %done.1, %land.lhs.true ]
  %conv38 = trunc i64 %length.2 to i32
  %kept = getelementptr inbounds nuw i8, ptr %cut, i64 64
  %18 = load ptr, ptr %kept, align 8
  %arrayidx39 = getelementptr inbounds i32, ptr %18, i64 %row.0
  store i32 %conv38, ptr %arrayidx39, align 4
  %cmp40 = icmp sgt i64 %length.2, 0
  %length.2. = select i1 %cmp40, i64 %length.2, i64 0
  %add46 = add nuw nsw i64 %at.0, %length.2.
  %inc48 = add i64 %row.0, 1
  br label %for.cond
for.end49:
  ret i64 %at.0
}
define dso_local i64 @strings_code(ptr %all) #0 {
entry:
  br label %for.cond
for.cond:
  %known.0 = phi i64 [ 0, %entry ], [ %known.1, %for.inc32 ]
  %row.0 = phi i64 [ 0, %entry ], [ %inc33, %for.inc32 ]
  %count = getelementptr inbounds nuw i8, ptr %all, i64 24
  %0 = load i64, ptr %count, align 8
  %cmp = icmp ult i64 %row.0, %0
  br i1 %cmp, label %for.body, label %for.end34
for.body:
  %1 = load ptr, ptr %all, align 8
  %starts = getelementptr inbounds nuw i8, ptr %all, i64 8
  %2 = load ptr, ptr %starts, align 8
  %arrayidx = getelementptr inbounds i64, ptr %2, i64 %row.0
  %3 = load i64, ptr %arrayidx, align 8
  %add.ptr = getelementptr inbounds i8, ptr %1, i64 %3
  %lengths = getelementptr inbounds nuw i8, ptr %all, i64 16
  %4 = load ptr, ptr %lengths, align 8
  %arrayidx2 = getelementptr inbounds i32, ptr %4, i64 %row.0
  %5 = load i32, ptr %arrayidx2, align 4
  %conv = sext i32 %5 to i64
  br label %for.cond.i
for.cond.i:
  %hash.i.0 = phi i64 [ %conv, %for.body ], [ %xor1.i, %for.body.i ]
  %n.i.0 = phi i64 [ 0, %for.body ], [ %add2.i, %for.body.i ]
  %add.i = add nuw nsw i64 %n.i.0, 8
  %cmp.i = icmp slt i64 %add.i, %conv
  br i1 %cmp.i, label %for.body.i, label %hash_of.exit
for.body.i:
  %add.ptr.i = getelementptr inbounds nuw i8, ptr %add.ptr, i64 %n.i.0
  %6 = load i64, ptr %add.ptr.i, align 1
  %xor.i = xor i64 %hash.i.0, %6
  %mul.i = mul i64 %xor.i, -7046029254386353131
  %shr.i = lshr i64 %mul.i, 32
  %xor1.i = xor i64 %mul.i, %shr.i
  %add2.i = add nuw nsw i64 %n.i.0, 8
  br label %for.cond.i
hash_of.exit:
  %cmp.i46 = icmp sgt i32 %5, 7
  br i1 %cmp.i46, label %if.then.i57, label %for.cond.i48
if.then.i57:
  %add.ptr.i58 = getelementptr inbounds nuw i8, ptr %add.ptr, i64 %conv
  %add.ptr1.i59 = getelementptr inbounds i8, ptr %add.ptr.i58, i64 -8
  %7 = load i64, ptr %add.ptr1.i59, align 1
  br label %tail.exit60
for.cond.i48:
  %n.i45.0 = phi i64 [ %inc.i56, %for.body.i51 ], [ 0, %hash_of.exit ]
  %word.i44.0 = phi i64 [ %or.i55, %for.body.i51 ], [ 0, %hash_of.exit ]
  %cmp2.i49 = icmp slt i64 %n.i45.0, %conv
  br i1 %cmp2.i49, label %for.body.i51, label %tail.exit60
for.body.i51:
  %shl.i52 = shl i64 %word.i44.0, 8
  %arrayidx.i53 = getelementptr inbounds nuw i8, ptr %add.ptr, i64 %n.i45.0
  %8 = load i8, ptr %arrayidx.i53, align 1
  %conv.i54 = zext i8 %8 to i64
  %or.i55 = or disjoint i64 %shl.i52, %conv.i54
  %inc.i56 = add nuw nsw i64 %n.i45.0, 1
  br label %for.cond.i48
tail.exit60:
  %retval.i41.0 = phi i64 [ %7, %if.then.i57 ], [ %word.i44.0, %for.cond.i48 ]
  %xor3.i = xor i64 %hash.i.0, %retval.i41.0
  %mul4.i = mul i64 %xor3.i, -7046029254386353131
  %shr5.i = lshr i64 %mul4.i, 32
  %xor6.i = xor i64 %mul4.i, %shr5.i
  %mask = getelementptr inbounds nuw i8, ptr %all, i64 40
  %9 = load i64, ptr %mask, align 8
  %and = and i64 %xor6.i, %9
  br label %for.cond3
for.cond3:
  %slot.0 = phi i64 [ %and, %tail.exit60 ], [ %and31, %for.inc ]
  %slots = getelementptr inbounds nuw i8, ptr %all, i64 32
  %10 = load ptr, ptr %slots, align 8
  %arrayidx4 = getelementptr inbounds i32, ptr %10, i64 %slot.0
  %11 = load i32, ptr %arrayidx4, align 4
  %tobool.not = icmp eq i32 %11, 0
  br i1 %tobool.not, label %if.then, label %if.end
if.then:
  %firsts = getelementptr inbounds nuw i8, ptr %all, i64 48
  %12 = load ptr, ptr %firsts, align 8
  %inc = add i64 %known.0, 1
  %arrayidx5 = getelementptr inbounds i64, ptr %12, i64 %known.0
  store i64 %row.0, ptr %arrayidx5, align 8
  %conv6 = trunc i64 %inc to i32
  %slots7 = getelementptr inbounds nuw i8, ptr %all, i64 32
  %13 = load ptr, ptr %slots7, align 8
  %arrayidx8 = getelementptr inbounds i32, ptr %13, i64 %slot.0
  store i32 %conv6, ptr %arrayidx8, align 4
  %conv9 = trunc i64 %inc to i32
  %sub = add nsw i32 %conv9, -1
  %codes = getelementptr inbounds nuw i8, ptr %all, i64 56
  %14 = load ptr, ptr %codes, align 8
  %arrayidx10 = getelementptr inbounds i32, ptr %14, i64 %row.0
  store i32 %sub, ptr %arrayidx10, align 4
  br label %for.inc32
if.end:
  %firsts11 = getelementptr inbounds nuw i8, ptr %all, i64 48
  %15 = load ptr, ptr %firsts11, align 8
  %sub12 = add i32 %11, -1
  %idxprom = zext i32 %sub12 to i64
  %arrayidx13 = getelementptr inbounds nuw i64, ptr %15, i64 %idxprom
  %16 = load i64, ptr %arrayidx13, align 8
  %lengths14 = getelementptr inbounds nuw i8, ptr %all, i64 16
  %17 = load ptr, ptr %lengths14, align 8
  %arrayidx15 = getelementptr inbounds i32, ptr %17, i64 %16
  %18 = load i32, ptr %arrayidx15, align 4
  %cmp16 = icmp eq i32 %18, %5
  br i1 %cmp16, label %land.lhs.true, label %for.inc
land.lhs.true:
  %19 = load ptr, ptr %all, align 8
  %starts19 = getelementptr inbounds nuw i8, ptr %all, i64 8
  %20 = load ptr, ptr %starts19, align 8
  %arrayidx20 = getelementptr inbounds i64, ptr %20, i64 %16
  %21 = load i64, ptr %arrayidx20, align 8
  %add.ptr21 = getelementptr inbounds i8, ptr %19, i64 %21
  %conv22 = sext i32 %5 to i64
  br label %for.cond.i3
for.cond.i3:
  %n.i2.0 = phi i64 [ 0, %land.lhs.true ], [ %add4.i, %if.end.i ]
  %add.i4 = add nuw nsw i64 %n.i2.0, 8
  %cmp.i5 = icmp slt i64 %add.i4, %conv22
  br i1 %cmp.i5, label %for.body.i7, label %for.end.i
for.body.i7:
  %add.ptr.i8 = getelementptr inbounds nuw i8, ptr %add.ptr21, i64 %n.i2.0
  %22 = load i64, ptr %add.ptr.i8, align 1
  %add.ptr1.i = getelementptr inbounds nuw i8, ptr %add.ptr, i64 %n.i2.0
  %23 = load i64, ptr %add.ptr1.i, align 1
  %cmp3.i.not = icmp eq i64 %22, %23
  br i1 %cmp3.i.not, label %if.end.i, label %for.inc
if.end.i:
  %add4.i = add nuw nsw i64 %n.i2.0, 8
  br label %for.cond.i3
for.end.i:
  %cmp.i26 = icmp sgt i32 %5, 7
  br i1 %cmp.i26, label %if.then.i37, label %for.cond.i28
if.then.i37:
  %add.ptr.i38 = getelementptr inbounds nuw i8, ptr %add.ptr21, i64 %conv22
  %add.ptr1.i39 = getelementptr inbounds i8, ptr %add.ptr.i38, i64 -8
  %24 = load i64, ptr %add.ptr1.i39, align 1
  br label %tail.exit40
for.cond.i28:
  %n.i25.0 = phi i64 [ %inc.i36, %for.body.i31 ], [ 0, %for.end.i ]
  %word.i24.0 = phi i64 [ %or.i35, %for.body.i31 ], [ 0, %for.end.i ]
  %cmp2.i29 = icmp slt i64 %n.i25.0, %conv22
  br i1 %cmp2.i29, label %for.body.i31, label %tail.exit40
for.body.i31:
  %shl.i32 = shl i64 %word.i24.0, 8
  %arrayidx.i33 = getelementptr inbounds nuw i8, ptr %add.ptr21, i64 %n.i25.0
  %25 = load i8, ptr %arrayidx.i33, align 1
  %conv.i34 = zext i8 %25 to i64
  %or.i35 = or disjoint i64 %shl.i32, %conv.i34
  %inc.i36 = add nuw nsw i64 %n.i25.0, 1
  br label %for.cond.i28
tail.exit40:
  %retval.i21.0 = phi i64 [ %24, %if.then.i37 ], [ %word.i24.0, %for.cond.i28 ]
  %cmp.i13 = icmp sgt i32 %5, 7
  br i1 %cmp.i13, label %if.then.i18, label %for.cond.i15
if.then.i18:
  %add.ptr.i19 = getelementptr inbounds nuw i8, ptr %add.ptr, i64 %conv22
  %add.ptr1.i20 = getelementptr inbounds i8, ptr %add.ptr.i19, i64 -8
  %26 = load i64, ptr %add.ptr1.i20, align 1
  br label %tail.exit
for.cond.i15:
  %n.i12.0 = phi i64 [ %inc.i, %for.body.i17 ], [ 0, %tail.exit40 ]
  %word.i.0 = phi i64 [ %or.i, %for.body.i17 ], [ 0, %tail.exit40 ]
  %cmp2.i = icmp slt i64 %n.i12.0, %conv22
  br i1 %cmp2.i, label %for.body.i17, label %tail.exit
for.body.i17:
  %shl.i = shl i64 %word.i.0, 8
  %arrayidx.i = getelementptr inbounds nuw i8, ptr %add.ptr, i64 %n.i12.0
  %27 = load i8, ptr %arrayidx.i, align 1
  %conv.i = zext i8 %27 to i64
  %or.i = or disjoint i64 %shl.i, %conv.i
  %inc.i = add nuw nsw i64 %n.i12.0, 1
  br label %for.cond.i15
tail.exit:
  %retval.i9.0 = phi i64 [ %26, %if.then.i18 ], [ %word.i.0, %for.cond.i15 ]
  %cmp6.i = icmp eq i64 %retval.i21.0, %retval.i9.0
  br i1 %cmp6.i, label %if.then25, label %for.inc
if.then25:
  %sub26 = add nsw i32 %11, -1
  %codes27 = getelementptr inbounds nuw i8, ptr %all, i64 56
  %28 = load ptr, ptr %codes27, align 8
  %arrayidx28 = getelementptr inbounds i32, ptr %28, i64 %row.0
  store i32 %sub26, ptr %arrayidx28, align 4
  br label %for.inc32
for.inc:
  %add = add i64 %slot.0, 1
  %mask30 = getelementptr inbounds nuw i8, ptr %all, i64 40
  %29 = load i64, ptr %mask30, align 8
  %and31 = and i64 %add, %29
  br label %for.cond3
for.inc32:
  %known.1 = phi i64 [ %known.0, %if.then25 ], [ %inc, %if.then ]
  %inc33 = add i64 %row.0, 1
  br label %for.cond
for.end34:
  ret i64 %known.0
}
